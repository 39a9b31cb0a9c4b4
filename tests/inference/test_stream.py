"""Streams: cut anywhere, forked, saved, of one size; and the window for models that cannot stream."""

import pytest
import torch

from fastweights.inference.stream import SlidingWindow, Stream, open_reader
from tests.training.small_text import random_model

MODELS = {
    "delta": {},
    "delta, both normalisations": {"normalization": "both"},
    "linear": {"rule": "sum", "normalization": "attention"},
    "performer": {"feature_map": "favor", "feature_map_options": {"m": 4}},
    "dpfp": {"feature_map": "dpfp", "feature_map_options": {"nu": 2}},
    "delta, forward positions": {"positions": "sinusoid", "position_direction": "forward"},
    "transformer": {"mixer": "softmax"},
    "xl": {"mixer": "relative", "mem_len": 5},
}
CONSTANT = [name for name in MODELS if name not in ("transformer", "xl")]
BACKWARD = {"positions": "sinusoid"}


def text(size=30):
    return torch.randint(23, (size,), generator=torch.Generator().manual_seed(size))


def whole(model, tokens):
    """log p (V,) after the text, all of it in one call."""
    with torch.no_grad():
        return model.softmax.log_prob(model(tokens[None])[0][0, -1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [[], [1], [13], [29], [4, 5, 20], list(range(1, 30))], ids=str)
def test_the_result_does_not_depend_on_the_cuts(name, cuts):
    model, tokens = random_model(**MODELS[name]), text()
    stream = Stream(model)
    for part in tokens.tensor_split(cuts):
        found = stream.feed(part)
    # Transformer-XL would see more than its memory in one call.
    expected = Stream(model).feed(tokens.tolist()) if name == "xl" else whole(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(stream.log_probs, found)
    assert stream.position == 30
    assert found.exp().sum() == pytest.approx(1)


def test_a_memory_that_reaches_the_beginning_sees_the_whole_text():
    model, tokens = random_model(mixer="relative", mem_len=40), text()
    torch.testing.assert_close(Stream(model).feed(tokens), whole(model, tokens))


def test_a_long_text_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr("fastweights.inference.stream._PIECE", 7)
    model, tokens = random_model(), text()
    torch.testing.assert_close(Stream(model).feed(tokens), whole(model, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_forks_go_their_own_ways(name):
    model, tokens = random_model(**MODELS[name]), text()
    stream = Stream(model)
    before = stream.feed(tokens[:20])
    fork = stream.fork()
    torch.testing.assert_close(fork.log_probs, before)
    other = fork.feed([3, 1, 4])
    torch.testing.assert_close(stream.feed(tokens[20:]), Stream(model).feed(tokens))
    torch.testing.assert_close(other, Stream(model).feed([*tokens[:20].tolist(), 3, 1, 4]))
    assert (fork.position, stream.position) == (23, 30)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_stream_goes_on_as_if_nothing_had_happened(name, tmp_path):
    model, tokens = random_model(**MODELS[name]), text()
    stream = Stream(model)
    before = stream.feed(tokens[:17])
    stream.save(tmp_path / "past.safetensors")
    again = Stream.load(model, tmp_path / "past.safetensors")
    assert torch.equal(again.log_probs, before) and again.position == 17
    assert torch.equal(again.feed(tokens[17:]), stream.feed(tokens[17:]))


def test_saved_streams_of_other_models_are_refused(tmp_path):
    stream = Stream(random_model())
    with pytest.raises(ValueError, match="nothing has been fed"):
        stream.save(tmp_path / "past")
    stream.feed([1])
    stream.save(tmp_path / "past")
    with pytest.raises(ValueError, match="n_layers: 2 there, 3 here"):
        Stream.load(random_model(n_layers=3), tmp_path / "past")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Stream.load(stream.model, tmp_path / "junk")
    stream.snapshot().state.save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"not what Stream\.save writes"):
        Stream.load(stream.model, tmp_path / "state")


@pytest.mark.parametrize("name", CONSTANT)
def test_the_state_has_one_size(name):
    model = random_model(**MODELS[name])
    stream = Stream(model)
    stream.feed([1])
    size = stream.nbytes
    stream.feed(text(1000))
    assert stream.nbytes == size > 0
    extra = 2 * 2 * 6 * 8 if "both" in name or name == "linear" else 0
    # Doubles for each number of Table 4's count, the accumulator, and the position.
    assert size == 8 * model.state_size() + extra + 8


def test_other_states_grow_to_their_limit():
    for options, limit in (({"mixer": "softmax"}, None), ({"mixer": "relative", "mem_len": 5}, 2 * 5 * 12 * 8 + 8)):
        stream, sizes = Stream(random_model(**options)), []
        for token in text(12).tolist():
            stream.feed([token])
            sizes.append(stream.nbytes)
        assert sizes[-1] == limit if limit else sizes == sorted(set(sizes))


def test_backward_positions_cannot_stream():
    with pytest.raises(ValueError, match="SlidingWindow"):
        Stream(random_model(**BACKWARD))


@pytest.mark.parametrize("options", [BACKWARD, {"mixer": "softmax"}], ids=str)
def test_a_window_reads_the_last_tokens_again(options):
    model, tokens = random_model(**options), text()
    window = SlidingWindow(model, 8)
    for start, end in ((0, 3), (3, 10), (10, 30)):
        torch.testing.assert_close(window.feed(tokens[start:end]), whole(model, tokens[:end][-8:]))
    fork = window.fork()
    fork.feed([1])
    torch.testing.assert_close(window.feed([2]), whole(model, torch.cat([tokens[-7:], torch.tensor([2])])))
    assert window.nbytes == 8 * 8


@pytest.mark.parametrize(
    ("options", "carried", "kind"),
    [
        ({}, False, Stream),
        (BACKWARD, False, SlidingWindow),
        ({"mixer": "softmax"}, False, SlidingWindow),
        ({"mixer": "relative", "mem_len": 4}, True, Stream),
        ({**BACKWARD, "position_direction": "forward"}, False, SlidingWindow),
        ({**BACKWARD, "position_direction": "forward"}, True, Stream),
    ],
)
def test_the_way_of_reading_suits_the_model(options, carried, kind):
    assert type(open_reader(random_model(**options), 8, carried)) is kind


@pytest.mark.parametrize("reader", [Stream, lambda model: SlidingWindow(model, 4)], ids=["stream", "window"])
def test_what_is_no_text_is_refused(reader):
    reading = reader(random_model())
    with pytest.raises(ValueError, match="at least one word"):
        reading.feed([])
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        reading.feed(torch.ones(1, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"a text or whole word numbers, got \['a'\]"):
        reading.feed(["a"])
    with pytest.raises(TypeError, match="float32"):
        reading.feed(torch.ones(2))
    with pytest.raises(ValueError, match="vocab_size - 1 = 22"):
        reading.feed([23])
    with pytest.raises(ValueError, match="length must be at least 1"):
        SlidingWindow(reading.model, 0)
    if isinstance(reading, Stream):
        with pytest.raises(ValueError, match="feed a token first"):
            _ = reading.log_probs


def test_only_a_gpu_records():
    with pytest.raises(ValueError, match="graph = True needs fast weights on a GPU, got mixer 'fast_weight' on cpu"):
        Stream(random_model(), graph=True)
