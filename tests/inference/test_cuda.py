"""Captured streams and searches on a GPU: the same words as eager ones, whatever is done between tokens."""

import pytest
import torch

from fastweights.inference.beam import beam_search
from fastweights.inference.stream import Stream, open_reader
from fastweights.inference.translate import CapturedDecoder, refusal
from tests.inference.test_capture import FAST
from tests.inference.test_stream import CONSTANT, MODELS, text
from tests.models.test_translation import V, make
from tests.training.small_text import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_on_gpu(name):
    return random_model(**MODELS[name]).float().cuda()


@pytest.mark.parametrize("name", CONSTANT)
def test_a_captured_stream_reads_as_an_uncaptured_one(name):
    model, tokens = model_on_gpu(name), text().tolist()
    plain, captured = Stream(model), Stream(model, graph=True)
    # One by one, several at once in between, and one by one again.
    for piece in (*([t] for t in tokens[:8]), tokens[8:15], *([t] for t in tokens[15:])):
        torch.testing.assert_close(captured.feed(piece), plain.feed(piece))
        torch.testing.assert_close(captured.log_probs, plain.log_probs)
    assert captured.position == plain.position == len(tokens) and captured.nbytes == plain.nbytes


def test_forks_and_saved_pasts_are_independent(tmp_path):
    model, tokens = model_on_gpu("delta"), text().tolist()
    stream = Stream(model, graph=True)
    for token in tokens[:10]:
        stream.feed([token])
    other = stream.fork()
    stream.save(tmp_path / "past.safetensors")
    ahead = [stream.feed([token]) for token in tokens[10:]]
    for reader in (other, Stream.load(model, tmp_path / "past.safetensors")):
        for token, expected in zip(tokens[10:], ahead, strict=True):
            torch.testing.assert_close(reader.feed([token]), expected)


def test_a_reader_on_a_gpu_is_captured():
    model = model_on_gpu("delta")
    reader = open_reader(model, 10)
    for token in (1, 2, 3):
        reader.feed([token])
    assert reader._captured is not None
    with pytest.raises(ValueError, match="needs fast weights on a GPU, got mixer 'softmax'"):
        Stream(model_on_gpu("transformer"), graph=True)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kind", FAST)
def test_a_captured_search_finds_the_same(kind, beam):
    model = make(kind).float().cuda().eval()
    torch.manual_seed(7)
    source, lengths = torch.randint(4, V, (9, 6)).cuda(), torch.tensor([6, 1, 3, 4, 2, 5, 6, 1, 2]).cuda()
    mask = torch.arange(6, device="cuda") < lengths.unsqueeze(1)
    assert refusal(model, source.device) is None
    for precision in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
            found = beam_search(CapturedDecoder(model), source, mask, beam=beam, n_best=beam, max_length=12)
            wanted = beam_search(model, source, mask, beam=beam, n_best=beam, max_length=12)
        for ours, theirs in zip(found, wanted, strict=True):
            # Products of other numbers of rows may be rounded in another way, and words that are close change places.
            if precision == torch.bfloat16:
                assert ours[0].log_prob == pytest.approx(theirs[0].log_prob, rel=0.02)
                continue
            assert [h.tokens for h in ours] == [h.tokens for h in theirs]
            assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], rel=1e-4)
