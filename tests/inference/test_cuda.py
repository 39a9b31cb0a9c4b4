"""Recorded streams on a GPU: the same words as unrecorded ones, whatever is done between tokens."""

import pytest
import torch

from fastweights.inference.stream import Stream, open_reader
from tests.inference.test_stream import CONSTANT, MODELS, text
from tests.training.small_text import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_on_gpu(name):
    return random_model(**MODELS[name]).float().cuda()


@pytest.mark.parametrize("name", CONSTANT)
def test_a_recorded_stream_reads_as_an_unrecorded_one(name):
    model, tokens = model_on_gpu(name), text().tolist()
    plain, recorded = Stream(model), Stream(model, graph=True)
    # One by one, several at once in between, and one by one again.
    for piece in (*([t] for t in tokens[:8]), tokens[8:15], *([t] for t in tokens[15:])):
        torch.testing.assert_close(recorded.feed(piece), plain.feed(piece))
        torch.testing.assert_close(recorded.log_probs, plain.log_probs)
    assert recorded.position == plain.position == len(tokens) and recorded.nbytes == plain.nbytes


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


def test_a_reader_on_a_gpu_is_recorded():
    model = model_on_gpu("delta")
    reader = open_reader(model, 10)
    for token in (1, 2, 3):
        reader.feed([token])
    assert reader._recorded is not None
    with pytest.raises(ValueError, match="needs fast weights on a GPU, got mixer 'softmax'"):
        Stream(model_on_gpu("transformer"), graph=True)
