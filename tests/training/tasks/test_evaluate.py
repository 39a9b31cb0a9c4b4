"""Perplexity: each protocol against the plainest way to compute it, and all of them in batches of any size."""

import math

import pytest
import torch

from fastweights.data.text.corpus import TokenStream
from fastweights.training.tasks.evaluate import _WORDS, Perplexity, Protocol, measure, protocol
from tests.training.small_text import random_model

MODELS = {
    "delta": {},
    "delta, positions": {"positions": "sinusoid"},
    "linear": {"rule": "sum", "normalization": "attention"},
    "transformer": {"mixer": "softmax", "positions": "sinusoid"},
    "xl": {"mixer": "relative", "mem_len": 6},
}
N, L = 47, 6


def text(size=N):
    return torch.randint(23, (size,), generator=torch.Generator().manual_seed(size))


def nll(model, tokens, targets, state=None):
    with torch.no_grad():
        return model.loss(tokens[None], targets[None], state)


def sliding(stride=1, batch=1, length=L):
    return Protocol(name="sliding", segment=length, batch=batch, stride=stride)


@pytest.mark.parametrize("name", MODELS)
def test_sliding_is_a_loop_over_positions(name):
    model, tokens = random_model(**MODELS[name]), text()
    expected = nll(model, tokens[:L], tokens[1 : L + 1])[0].sum()
    for i in range(1, N - L):
        expected += nll(model, tokens[i : i + L], tokens[i + 1 : i + L + 1])[0][0, -1]
    found = measure(model, TokenStream(tokens), sliding())
    assert found.tokens == N - 1
    assert found.nll == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("stride", [1, 2, 5, L])
@pytest.mark.parametrize("name", MODELS)
def test_windows_may_come_in_batches(name, stride):
    model, stream = random_model(**MODELS[name]), TokenStream(text())
    expected = measure(model, stream, sliding(stride))
    for batch in (2, 7, 1000):
        found = measure(model, stream, sliding(stride, batch))
        assert found.tokens == expected.tokens == N - 1
        assert found.nll == pytest.approx(expected.nll, rel=1e-12)


def test_only_scored_positions_go_through_the_softmax():
    model, seen = random_model(), []
    model.softmax.register_forward_hook(lambda module, inputs, output: seen.append(output.numel()))
    measure(model, TokenStream(text()), sliding(batch=8))
    assert sum(seen) == N - 1


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("name", ["delta", "linear", "xl"])
def test_segments(name, carry):
    model, tokens, rows = random_model(**MODELS[name]), text(), 3
    size = N // rows
    expected = torch.zeros((), dtype=torch.float64)
    for row in tokens[: size * rows].view(rows, size):
        state = None
        for start in range(0, size - 1, L):
            stop = min(start + L, size - 1)
            loss, after = nll(model, row[start:stop], row[start + 1 : stop + 1], state)
            state = after if carry else None
            expected += loss.sum()
    memory = {"mem_len": 6} if name == "xl" else {}
    found = measure(model, TokenStream(tokens), Protocol(name="segment", segment=L, batch=rows, carry=carry, **memory))
    assert found.tokens == rows * (size - 1)
    assert found.nll == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", ["delta", "linear"])
@pytest.mark.parametrize("segment", [1, 5, 100])
def test_a_carried_state_reads_the_text_as_one(name, segment):
    model, tokens = random_model(**MODELS[name]), text()
    expected = nll(model, tokens[:-1], tokens[1:])[0].sum()
    found = measure(model, TokenStream(tokens), Protocol(name="carried", segment=segment, batch=1, carry=True))
    assert found.tokens == N - 1
    assert found.nll == pytest.approx(float(expected), rel=1e-12)


def test_windows_of_one_batch_have_as_many_words_as_the_device_likes():
    config = random_model().config
    assert protocol("sliding", config, 1).batch == protocol("sliding", config, 1, device="mps").batch == 8192
    assert protocol("sliding", config, 256, device="cuda:0").batch == _WORDS["cuda"] // 256 > 32
    assert protocol("sliding", config, 8192).batch == protocol("sliding", config, 9000).batch == 1
    assert protocol("sliding", config, 256, batch=3).batch == 3


@pytest.mark.parametrize(("mem_len", "segment"), [(15, 1), (4, 4), (0, 4), (64, 64)])
def test_memory_lengths_of_transformer_xl(mem_len, segment):
    model, tokens = random_model(**MODELS["xl"]), text()
    how = protocol("carried", model.config, 3, mem_len=mem_len, segment=None if mem_len else 4)
    assert (how.segment, how.mem_len, how.clamp_len, how.batch) == (segment, mem_len, 3, 1)
    found = measure(model, TokenStream(tokens), how)
    layers = [block.mixer for block in model.blocks]
    assert all((layer.mem_len, layer.clamp_len) == (6, None) for layer in layers)
    model.set_memory(mem_len, 3)
    state, expected = None, 0.0
    for start in range(0, N - 1, segment):
        stop = min(start + segment, N - 1)
        loss, state = nll(model, tokens[start:stop], tokens[start + 1 : stop + 1], state)
        expected += float(loss.sum())
        assert all(layer.inputs.shape[1] == min(mem_len, stop) for layer in state.layers)
    assert found.nll == pytest.approx(expected, rel=1e-12)


def test_measuring_leaves_the_model_as_it_was():
    model = random_model(dropout=0.5).train()
    first = measure(model, TokenStream(text()), sliding())
    assert model.training and first == measure(model, TokenStream(text()), sliding())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_progress_ends_at_the_number_of_tokens():
    told = []
    measure(random_model(), TokenStream(text()), sliding(batch=9), lambda done, total: told.append((done, total)))
    assert told[0] == (L, N - 1) and told[-1] == (N - 1, N - 1)


def test_perplexity_and_bits():
    found = Perplexity(10 * math.log(8), 10)
    assert found.ppl == pytest.approx(8) and found.bits == pytest.approx(3)
    assert Perplexity(1e6, 10).ppl == Perplexity(701.0, 1).ppl == math.inf > Perplexity(700.0, 1).ppl > 1e300
    assert math.isnan(Perplexity(math.nan, 10).ppl)


def test_a_broken_model_has_no_perplexity():
    model = random_model()
    with torch.no_grad():
        model.softmax.bias[3] = math.nan
    assert math.isnan(measure(model, TokenStream(text()), sliding()).ppl)


def test_protocols_are_filled_in():
    config = random_model().config
    assert protocol("segment", config, 256) == Protocol(name="segment", segment=256, batch=10)
    assert protocol("segment", config, 256, carried=True).carry
    assert protocol("sliding", config, 256, device="cuda").batch == 256
    assert protocol("sliding", config, 100_000).batch == 1
    how = protocol("carried", config, 256, segment=64)
    assert (how.segment, how.batch, how.carry, how.stride) == (64, 1, True, None)
    xl = random_model(**MODELS["xl"]).config
    assert {n: protocol("carried", xl, 384, mem_len=n).segment for n in (15, 64, 128, 384)} == {
        15: 1,
        64: 64,
        128: 128,
        384: 384,
    }
    slugs = {protocol("carried", xl, 384, mem_len=n).slug for n in (15, 64)} | {protocol("sliding", xl, 384).slug}
    assert len(slugs) == 3


@pytest.mark.parametrize(
    ("model", "name", "options", "message"),
    [
        ("delta", "slidding", {}, "did you mean 'sliding'"),
        ("delta", "segment", {"stride": 2}, "stride is for protocol 'sliding'"),
        ("delta", "sliding", {"stride": 0}, "stride must be at least 1"),
        ("delta", "carried", {"mem_len": 3}, "memory of Transformer-XL"),
        ("xl", "sliding", {"mem_len": 3}, "a sliding window has no memory"),
        ("transformer", "carried", {}, "cannot be carried"),
        ("delta, positions", "carried", {}, "positions 'none'"),
    ],
)
def test_protocols_that_cannot_work(model, name, options, message):
    with pytest.raises(ValueError, match=message):
        protocol(name, random_model(**MODELS[model]).config, 16, **options)
