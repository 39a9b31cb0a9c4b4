"""Captured steps: what a graph remembers is memory, so rows that are left, forked or new have to be put into it.

A CUDA graph cannot be had on a CPU. Here `capture_after_warmup` is replaced by one that, like a graph, knows inputs and
results by their memory alone.
"""

import pytest
import torch

from fastweights.common.tree import tensors_of
from fastweights.inference import capture as captured_module
from fastweights.inference.beam import beam_search
from fastweights.inference.capture import CapturedStep
from fastweights.inference.stream import Stream
from fastweights.inference.translate import CapturedDecoder, refusal, translate
from tests.inference.test_beam import sharp, sources
from tests.inference.test_stream import CONSTANT, MODELS, text
from tests.models.test_translation import MODELS as MODELS_OF_TRANSLATION
from tests.training.small_text import random_model

FAST = ["linear", "delta", "performer"]


@pytest.fixture
def captures(monkeypatch):
    """How many captures there were."""
    count = []

    def capture(work, device):
        result = work()
        count.append(result)

        def replay():
            for place, x in zip(tensors_of(result), tensors_of(work()), strict=True):
                place.copy_(x)
            return result

        return replay

    monkeypatch.setattr(captured_module, "capture_after_warmup", capture)
    return count


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kind", FAST)
def test_a_search_with_captured_steps_finds_the_same(captures, kind, beam):
    model, (source, mask) = sharp(kind), sources()
    found = beam_search(CapturedDecoder(model), source, mask, beam=beam, n_best=beam)
    wanted = beam_search(model, source, mask, beam=beam, n_best=beam)
    for ours, theirs in zip(found, wanted, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs])
    # As sentences leave: from four to two of them one graph does.
    assert 1 <= len(captures) <= 3


def test_a_recording_serves_the_next_batch(captures):
    model, (source, mask) = sharp("delta"), sources()
    decoding = CapturedDecoder(model)
    for rows in (slice(0, 4), slice(1, 4)):
        found = beam_search(decoding, source[rows], mask[rows], beam=2, max_length=4, early_stop=False)
        wanted = beam_search(model, source[rows], mask[rows], beam=2, max_length=4, early_stop=False)
        assert [h[0].tokens for h in found] == [h[0].tokens for h in wanted]
    assert len(captures) == 1


def test_another_number_of_beams_is_another_recording(captures):
    model, (source, mask) = sharp("delta"), sources()
    decoding = CapturedDecoder(model)
    for beam in (4, 2, 3):
        found = beam_search(decoding, source, mask, beam=beam, max_length=5)
        wanted = beam_search(model, source, mask, beam=beam, max_length=5)
        assert [h[0].tokens for h in found] == [h[0].tokens for h in wanted]
        assert [h[0].log_prob for h in found] == pytest.approx([h[0].log_prob for h in wanted])
    assert len(captures) >= 3


def test_a_recording_outlives_inference_mode(captures):
    model, tokens = random_model(), text().tolist()
    plain, stream = Stream(model), captured_stream(model)
    with torch.inference_mode():
        for token in tokens[:3]:
            stream.feed([token])
            plain.feed([token])
    for token in tokens[3:6]:
        torch.testing.assert_close(stream.feed([token]), plain.feed([token]))


def test_a_state_that_grows_is_refused(captures):
    model, (source, mask) = sharp("softmax"), sources()
    with torch.no_grad():
        _, state = model.step(torch.zeros(4, dtype=torch.int64), model.encode(source, mask))
        with pytest.raises(ValueError, match="the state grows with every token"):
            CapturedStep(model.step, torch.zeros(4, dtype=torch.int64), state)


@pytest.mark.parametrize("kind", MODELS_OF_TRANSLATION)
def test_what_grows_is_refused_and_nothing_else(kind):
    model, (source, mask) = sharp(kind), sources()
    token = torch.zeros(4, dtype=torch.int64)
    with torch.no_grad():
        _, before = model.step(token, model.encode(source, mask))
        _, after = model.step(token, before)
    grows = [x.shape for x in tensors_of(before)] != [x.shape for x in tensors_of(after)]
    assert grows == (refusal(model, torch.device("cuda")) is not None)


def test_sources_of_another_length_are_another_recording(captures):
    model, (source, mask) = sharp("delta"), sources()
    decoding = CapturedDecoder(model)
    assert model.config.cross == "softmax"
    for length in (6, 4, 5):
        rows = (source[:, :length], mask[:, :length])
        found = beam_search(decoding, *rows, beam=2, max_length=5)
        wanted = beam_search(model, *rows, beam=2, max_length=5)
        assert [h[0].tokens for h in found] == [h[0].tokens for h in wanted]
        assert [h[0].log_prob for h in found] == pytest.approx([h[0].log_prob for h in wanted])
    assert len(captures) >= 3


def captured_stream(model, **options):
    stream = Stream(model, **options)
    # What only a GPU is allowed.
    stream._graph = True
    return stream


@pytest.mark.parametrize("name", CONSTANT)
def test_a_captured_stream_reads_as_an_eager_one(captures, name):
    model, tokens = random_model(**MODELS[name]), text().tolist()
    plain, stream = Stream(model), captured_stream(model)
    for piece in (*([t] for t in tokens[:8]), tokens[8:15], *([t] for t in tokens[15:20])):
        torch.testing.assert_close(stream.feed(piece), plain.feed(piece))
        torch.testing.assert_close(stream.log_probs, plain.log_probs)
    assert len(captures) == 1 and stream.position == plain.position == 20 and stream.nbytes == plain.nbytes
    # What `fork` does: the copy stays as it is while the graph goes on.
    other = captured_stream(model)
    other._past = stream.snapshot()
    ahead = [stream.feed([t]) for t in tokens[20:]]
    for token, expected in zip(tokens[20:], ahead, strict=True):
        torch.testing.assert_close(other.feed([token]), expected)


def test_a_snapshot_in_fewer_bits_stays_as_it_was(captures):
    model, tokens = random_model(normalization="both", short_conv=3), text().tolist()
    stream = captured_stream(model, state_format="int8")
    for token in tokens[:5]:
        stream.feed([token])
    snapshot = stream.snapshot()
    ahead = [stream.feed([t]) for t in tokens[5:8]]
    assert snapshot.position == 5
    stream.roll_back(snapshot)
    for token, expected in zip(tokens[5:8], ahead, strict=True):
        assert torch.equal(stream.feed([token]), expected)


def test_what_cannot_be_captured_is_said():
    for kind, reason in (("linear", "a CUDA graph needs a CUDA device, and this is cpu"), ("softmax", "that grows")):
        with pytest.raises(ValueError, match=f"graph = True cannot be had: .*{reason}"):
            translate(sharp(kind), None, ["a line"], graph=True)


def test_weights_under_fsdp_are_not_captured():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model, cuda = sharp("linear"), torch.device("cuda")
    assert refusal(model, cuda) is None
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(model.embedding.weight.detach(), init_device_mesh("cpu", (1,)))
        model.embedding.weight = torch.nn.Parameter(weight)
        assert "processes share the model" in refusal(model, cuda)
    finally:
        torch.distributed.destroy_process_group()
