"""Batches of pairs: each pair once an epoch, within the budget, any batch without those before it."""

import numpy as np
import pytest
import torch

from fastweights.common.tree import pack, to_device, unpack
from fastweights.data.pairs.bpe import BOS, EOS, PAD
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from tests.data.pair_files import write_parallel


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    write_parallel(folder / "files", train=333)
    prepare("parallel", folder / "files", folder / "out", vocab=280)
    return ParallelCorpus.load(folder / "out").split("train")


def tokens(batch):
    """Return how many target tokens are scored."""
    return int(batch.target_mask.sum())


def rows(batch):
    """The pairs of a batch as token numbers without specials, by the masks alone."""
    sources = [row[mask].tolist() for row, mask in zip(batch.source, batch.source_mask, strict=True)]
    targets = [row[mask].tolist() for row, mask in zip(batch.target_out, batch.target_mask, strict=True)]
    return list(zip(sources, targets, strict=True))


def everything(split):
    return sorted(([*split.source(n), EOS], [*split.target(n), EOS]) for n in range(len(split)))


@pytest.mark.parametrize("pad_to", [1, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_each_pair_once_within_the_budget(split, shuffle, pad_to):
    batches = split.batches(400, seed=3, max_length=None, shuffle=shuffle, pad_to=pad_to)
    for epoch in range(2):
        seen = []
        for index in range(epoch * len(batches), (epoch + 1) * len(batches)):
            batch = batches.batch_at(index)
            seen += rows(batch)
            assert batch.source.numel() <= 400 and batch.target_in.numel() <= 400
            assert batch.source.shape[1] % pad_to == batch.target_in.shape[1] % pad_to == 0
            assert len(batch.source) == len(batches.rows(index))
        assert sorted(seen) == everything(split)


def test_what_a_batch_holds(split):
    batches = split.batches(400, seed=3, max_length=None, shuffle=True)
    batch = batches.batch_at(5)
    assert batch.source.dtype == batch.target_in.dtype == batch.target_out.dtype == torch.int64
    assert batch.source_mask.dtype == batch.target_mask.dtype == torch.bool
    for place, number in enumerate(batches.rows(5)):
        source, target = split.source(int(number)).tolist(), split.target(int(number)).tolist()
        width, length = batch.source.shape[1], batch.target_in.shape[1]
        assert batch.source[place].tolist() == [*source, EOS] + [PAD] * (width - len(source) - 1)
        assert batch.target_in[place].tolist() == [BOS, *target] + [PAD] * (length - len(target) - 1)
        assert batch.target_out[place].tolist() == [*target, EOS] + [PAD] * (length - len(target) - 1)
        assert batch.source_mask[place].sum() == len(source) + 1 and batch.target_mask[place].sum() == len(target) + 1
    assert torch.equal(batch.source_mask, batch.source != PAD) and torch.equal(
        batch.target_mask, batch.target_out != PAD
    )
    assert tokens(batch) == sum(len(split.target(int(number))) + 1 for number in batches.rows(5))


def test_many_sentences_are_those_one_by_one(split):
    numbers = np.array([3, 0, 3, len(split) - 1])
    for side, one in (("source", split.source), ("target", split.target)):
        assert split.tokens(side, numbers).tolist() == [t for number in numbers for t in one(int(number)).tolist()]


def test_batches_are_of_like_length(split):
    """Sorting leaves little padding: no more than one bucket's width a sentence, and what mixes at the borders."""
    batches = split.batches(400, seed=0, max_length=None, shuffle=True)
    wide = sum(batch.target_mask.numel() for batch in batches)
    assert sum(tokens(batch) for batch in batches) > 0.6 * wide


def test_the_order_follows_from_seed_and_epoch(split):
    first, second = (split.batches(400, seed=1, max_length=None, shuffle=True) for _ in range(2))
    size = len(first)
    wanted = [first.rows(index) for index in range(3 * size)]
    for index in (2 * size + 1, 0, size, 3 * size - 1, 1):
        np.testing.assert_array_equal(second.rows(index), wanted[index])
    other = split.batches(400, seed=2, max_length=None, shuffle=True)

    def same(one, two):
        return all(len(a) == len(b) and (a == b).all() for a, b in zip(one, two, strict=True))

    assert not same(wanted[:size], wanted[size : 2 * size])
    assert not same(wanted[:size], [other.rows(index) for index in range(size)])
    # Not only the order of batches changes but who is in them.
    assert {frozenset(row.tolist()) for row in wanted[:size]} != {
        frozenset(row.tolist()) for row in wanted[size : 2 * size]
    }
    fixed = split.batches(400, seed=1, max_length=None, shuffle=False)
    assert same([fixed.rows(index) for index in range(size)], [fixed.rows(size + index) for index in range(size)])


@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_each_batch(split, world):
    batches = split.batches(400, seed=4, max_length=None, shuffle=True)
    for index in range(len(batches)):
        whole, parts = batches.batch_at(index), [batches.batch_at(index, rank, world) for rank in range(world)]
        assert sum(tokens(part) for part in parts) == tokens(whole)
        assert sorted(row for part in parts if tokens(part) for row in rows(part)) == sorted(rows(whole))
        assert {part.source.shape[1] for part in parts} == {whole.source.shape[1]}
        assert {part.target_in.shape[1] for part in parts} == {whole.target_in.shape[1]}


def test_a_rank_without_a_pair_counts_nothing(split):
    batches = split.batches(56, seed=4, max_length=None, shuffle=True)
    index = min(range(len(batches)), key=lambda index: len(batches.rows(index)))
    few = len(batches.rows(index))
    empty = batches.batch_at(index, few, few + 1)
    assert tokens(empty) == 0 and len(empty.source) == 1 and empty.source_mask.any()


def test_max_length(split):
    batches = split.batches(400, seed=0, max_length=20, shuffle=True)
    longest = np.maximum(split.lengths("source"), split.lengths("target")) + 1
    kept = np.flatnonzero(longest <= 20)
    assert 0 < len(kept) < len(split) and batches.left_out == len(split) - len(kept)
    assert sorted(n for index in range(len(batches)) for n in batches.rows(index)) == kept.tolist()


def test_devices_and_checkpoints(split):
    batch = split.batches(400, seed=0, max_length=None, shuffle=True).batch_at(0)
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch) and moved.source.device.type == "meta"
    again = unpack(pack(batch), torch.device("cpu"))
    assert type(again) is type(batch) and all(map(torch.equal, again, batch))


def test_refusals(split):
    longest = int(max(split.lengths("source").max(), split.lengths("target").max())) + 1
    with pytest.raises(ValueError, match=rf"longest pair takes {-(-longest // 8) * 8} padded tokens, max_tokens is 8"):
        split.batches(8, seed=0, max_length=None, shuffle=True)
    with pytest.raises(ValueError, match="no pair has at most max_length = 1"):
        split.batches(400, seed=0, max_length=1, shuffle=True)
    with pytest.raises(ValueError, match="pad_to must be"):
        split.batches(400, seed=0, max_length=None, shuffle=True, pad_to=0)
    batches = split.batches(400, seed=0, max_length=None, shuffle=True)
    with pytest.raises(IndexError, match="at least 0"):
        batches.batch_at(-1)
    with pytest.raises(ValueError, match="world - 1 = 1"):
        batches.batch_at(0, 2, 2)
