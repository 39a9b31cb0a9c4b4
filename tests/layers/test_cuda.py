"""The layers' kernels on a GPU against float64 there, and a language model's recorded updates against plain ones."""

import pytest
import torch

from fastweights.benchmarks import lm
from fastweights.ops.gpu.adaptive_softmax import self_check as adaptive
from fastweights.ops.gpu.feedforward import self_check as feedforward
from fastweights.ops.gpu.label_smoothing import self_check as smoothing
from fastweights.ops.gpu.label_smoothing.launch import BLOCK
from fastweights.ops.self_check import LIMITS
from tests.ops.calls import linear_attention_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [16, 72, 128])
@pytest.mark.parametrize("cutoffs", [(500, 1000, 7500), ()], ids=str)
def test_softmax(dtype, d, cutoffs):
    for tokens in (1, 129, 1000):
        errors = adaptive.compare(dtype, torch.float32, d, CUDA, tokens, 9001, cutoffs)
        assert all(error < LIMITS[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("d_model", [16, 100, 128, 256])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_feedforward(d_model, p):
    for tokens in (1, 129, 1000):
        errors = feedforward.compare(torch.bfloat16, d_model, 300, CUDA, tokens, p)
        assert all(error < LIMITS[torch.bfloat16] for error in errors.values()), errors


@pytest.mark.parametrize("dtype", smoothing.DTYPES, ids=str)
@pytest.mark.parametrize("words", [5, BLOCK, 32_000])
def test_smoothed_losses(dtype, words):
    errors = smoothing.compare(dtype, CUDA, 700, words)
    assert all(error < LIMITS[dtype] for error in errors.values()), errors


@pytest.mark.parametrize(("T", "S"), [(57, 57), (500, 500), (5, 1500)])
@pytest.mark.parametrize("D", [64, 512])
@pytest.mark.parametrize("mean", [0, 5])
def test_linear_attention_of_16_bits(D, T, S, mean):
    assert all(error < 1e-2 for error in linear_attention_errors(torch.bfloat16, D, T, S, mean, CUDA))


@pytest.mark.parametrize("model", lm.MODELS)
def test_the_fast_way_learns_the_same(model):
    """Also with random features, which both ways draw alike from one seed as long as nothing is compiled."""
    ways = ["bf16", "graph"] if "performer" in model else ["plain", "fast"]
    found = lm.agreement(lm.random_corpus("tiny"), "tiny", model, ways, "cuda", 12)
    assert found["agree"], found["largest_difference"]
