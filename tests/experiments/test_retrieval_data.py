"""What the synthetic batches promise."""

import pytest
import torch

from fastweights.data.synthetic import evaluation_batch, permutations, training_batches
from tests.experiments.retrieval_oracle import last_value


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [2, 40, 150])
def test_permutations(size):
    rows = permutations(500, size, generator())
    assert (rows.sort(-1).values == torch.arange(size)).all()
    # Every number stands at every place: the mean of each column is that of 0 … S-1, within five standard errors.
    error = size / 12**0.5 / 500**0.5
    assert (rows.double().mean(0) - (size - 1) / 2).abs().max() < 5 * error


def test_setting_1_pairs_every_key_with_its_own_value():
    batches = list(training_batches(1, 30, 4, 8, generator()))
    assert len(batches) == 4
    for batch in batches:
        assert batch.keys is None
        assert (batch.values.sort(-1).values == torch.arange(30)).all()
        assert (batch.values.gather(-1, batch.queries) == batch.targets).all()
    assert len({tuple(row.tolist()) for batch in batches for row in batch.values}) == 32
    assert len({query for batch in batches for query in batch.queries.flatten().tolist()}) > 15


def test_setting_2_wants_the_last_value():
    batches = list(training_batches(2, 10, 5, 8, generator()))
    repeated = 0
    for batch in batches:
        assert batch.keys.shape == batch.values.shape == (8, 20)
        for keys, values, (query,), (target,) in zip(*batch[:4], strict=True):
            assert query in keys
            assert target == last_value(keys, values, query)
            repeated += int((keys == query).sum() > 1)
    assert repeated > 20


def test_setting_2_asks_for_a_key_as_often_as_it_occurs():
    (batch,) = training_batches(2, 2, 1, 20000, generator(), length=4)
    ones = batch.keys.sum(-1)
    asked = batch.queries.squeeze(-1)[ones == 1].double().mean()
    assert abs(asked - 0.25) < 0.02


@pytest.mark.parametrize(("length", "expected"), [(None, 12), (24, 24)])
def test_evaluation_asks_for_every_key_present(length, expected):
    batch = evaluation_batch(2, 12, 6, generator(), length)
    assert batch.queries is None
    assert batch.keys.shape == (6, expected)
    for keys, values, targets, weights in zip(batch.keys, batch.values, batch.targets, batch.weights, strict=True):
        assert set(weights.nonzero().flatten().tolist()) == set(keys.tolist())
        for query in set(keys.tolist()):
            assert weights[query] == 1
            assert targets[query] == last_value(keys, values, query)


def test_evaluation_in_setting_1():
    batch = evaluation_batch(1, 12, 6, generator())
    assert batch.keys is None
    assert (batch.targets == batch.values).all()
    assert (batch.weights == 1).all()


def test_query_cap_and_chunks():
    batch = evaluation_batch(1, 12, 2, generator(), query_cap=8)
    assert batch.weights.tolist() == [[1.0] * 8 + [0.0] * 4] * 2
    batch = evaluation_batch(1, 12, 2, generator(), query_cap=8, chunk=3)
    assert batch.weights.tolist() == [[1 / 3] * 6 + [1 / 2] * 2 + [0.0] * 4] * 2
    # Every chunk has weight 1: the weighted mean is the mean over chunks.
    batch = evaluation_batch(2, 40, 20, generator(), chunk=7)
    chunks = sum(-(-int((row > 0).sum()) // 7) for row in batch.weights)
    assert batch.weights.sum().item() == pytest.approx(chunks)
