"""The layers' kernels on a GPU against float64 there, and a language model's recorded updates against plain ones."""

import json
from functools import partial

import pytest
import torch

import fastweights as fw
from fastweights.benchmarks import lm
from fastweights.common.cuda_graph import capture_after_warmup
from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.layers.feedforward import FeedForward
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.fused.gated_norm import gated_rms_norm
from fastweights.ops.fused.short_convolution import short_convolution
from fastweights.ops.gpu import self_check
from fastweights.ops.gpu.adaptive_softmax import self_check as adaptive
from fastweights.ops.gpu.features import self_check as features
from fastweights.ops.gpu.feedforward import self_check as feedforward
from fastweights.ops.gpu.gated_norm import self_check as gated_norm
from fastweights.ops.gpu.label_smoothing import self_check as smoothing
from fastweights.ops.gpu.label_smoothing.launch import BLOCK
from fastweights.ops.gpu.linear_attention import self_check as linear
from fastweights.ops.gpu.linear_attention.launch import KEPT, ONE_LAUNCH, PARTS, WEIGHTS, Call, tile_width
from fastweights.ops.gpu.self_check import LIMITS
from fastweights.ops.gpu.short_convolution import self_check as convolution
from fastweights.ops.gpu.short_convolution.self_check import Kind
from fastweights.ops.losses.label_smoothing import smoothed_nll
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


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind(dtype, 4, True, bias=True, recent=True, packed=True, starts=True) for dtype in convolution.DTYPES),
        Kind(torch.bfloat16, 8, True),
        Kind(torch.float16, 2, False, recent=True),
    ],
    ids=str,
)
def test_short_convolution(kind):
    for T in (1, 77, 1000):
        errors = convolution.compare(kind, CUDA, 3, T, 300)
        assert all(error < LIMITS[kind.dtype] for error in errors.values()), (T, errors)


@pytest.mark.parametrize(
    ("dtype", "opening", "M"),
    [(torch.bfloat16, "silu", 128), (torch.float16, "sigmoid", 100), (torch.float32, None, 1000)],
    ids=str,
)
def test_gated_norm(dtype, opening, M):
    for tokens in (1, 3000):
        errors = gated_norm.compare(dtype, opening, CUDA, (2, tokens, 3, M))
        assert all(error < LIMITS[dtype] for error in errors.values()), (tokens, errors)


@pytest.mark.parametrize("name", ["none", "silu", "elu"])
@pytest.mark.parametrize("norm", ["l2", "sum"])
@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float32)]
)
def test_features(dtype, out, norm, name):
    phi = Features.named(name, sum=norm == "sum", l2=norm == "l2", scale=0.3)
    for tokens, M in ((1, 128), (3000, 64), (50, 100)):
        errors = features.compare(phi, dtype, out, CUDA, (2, tokens, 3, M))
        assert all(error < LIMITS[dtype] for error in errors.values()), (tokens, M, errors)


def test_a_captured_convolution_takes_other_bounds():
    """The same bits as in eager calls."""
    tensors = torch.randn(1, 500, 96, device=CUDA), torch.randn(96, 4, device=CUDA)
    recent, dy = torch.randn(4, 3, 96, device=CUDA), torch.randn(1, 500, 96, device=CUDA)
    bounds = torch.tensor([0, 100, 100, 300, 500], device=CUDA)

    def run(bounds):
        # Leaves of an earlier call would tie this one to its stream.
        x, weight = leaves = [x.detach().requires_grad_() for x in tensors]
        y, end = short_convolution(x, weight, None, recent, silu=True, cu_seqlens=bounds)
        return [y.detach(), end.detach(), *torch.autograd.grad((y * dy).sum() + end.sum(), leaves)]

    replay = capture_after_warmup(lambda: run(bounds), CUDA)
    for other in ([0, 1, 2, 499, 499], [0, 0, 0, 0, 0], [0, 100, 100, 300, 500]):
        bounds.copy_(torch.tensor(other))
        again = run(torch.tensor(other, device=CUDA))
        assert all(torch.equal(a, b) for a, b in zip(replay(), again, strict=True))


def adaptive_softmax():
    layer = AdaptiveSoftmax(9000, 64, (500, 1000)).to(CUDA)
    targets = torch.randint(9000, (40,), device=CUDA)
    return lambda x: layer(x, targets), torch.randn(40, 64, device=CUDA)


def feed_forward():
    return FeedForward(64, 300).to(CUDA, torch.bfloat16), torch.randn(40, 64, device=CUDA, dtype=torch.bfloat16)


def linear_attention():
    k, v = torch.randn(2, 1, 30, 2, 16, device=CUDA).unbind()
    return lambda x: fw.linear_attention(x, k, v, features=ELU), torch.randn(1, 40, 2, 16, device=CUDA)


def label_smoothing():
    targets = torch.randint(300, (40,), device=CUDA)
    return lambda x: sum(smoothed_nll(x, targets, 0.1)), torch.randn(40, 300, device=CUDA)


def convolution_of_texts():
    weight, recent = torch.randn(24, 4, device=CUDA), torch.randn(2, 3, 24, device=CUDA)
    starts = torch.arange(40, device=CUDA).expand(2, 40) == 17
    run = partial(short_convolution, weight=weight, recent=recent, silu=True, starts=starts)
    return lambda x: torch.cat(run(x), 1), torch.randn(2, 40, 24, device=CUDA)


def norm_and_gate():
    weight = torch.randn(24, device=CUDA)
    return lambda x: gated_rms_norm(x, weight, x.cos(), "silu"), torch.randn(2, 10, 3, 24, device=CUDA)


MAKERS = [adaptive_softmax, feed_forward, label_smoothing, linear_attention, convolution_of_texts, norm_and_gate]


@pytest.mark.parametrize("make", MAKERS)
def test_every_kind_of_derivative(make):
    """By the kernels' own backward pass, and by plain PyTorch where a transform or forward mode is active."""
    run, x = make()
    x.requires_grad_()
    y = run(x)
    weights = torch.randn(3, *y.shape, device=CUDA, dtype=y.dtype)
    loop = torch.stack([torch.autograd.grad(y, x, w, retain_graph=True)[0] for w in weights])
    close = {"rtol": 2e-2, "atol": 2e-2} if x.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    (batched,) = torch.autograd.grad(y, x, weights, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, loop, **close)
    plain = torch.func.vmap(torch.func.vjp(run, x.detach())[1])(weights)[0]
    torch.testing.assert_close(plain, loop, **close)
    tangent = torch.randn_like(x)
    _, along = torch.func.jvp(run, (x.detach(),), (tangent,))
    for w, gradient in zip(weights, loop, strict=True):
        torch.testing.assert_close((along * w).sum(), (gradient * tangent).sum(), rtol=5e-2, atol=5e-2)


def test_verdicts_are_kept_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_reasons", {})
    self_check._verdicts.cache_clear()
    try:
        for make in MAKERS:
            run, x = make()
            run(x)
        kept = [json.loads(file.read_text())["verdicts"] for file in tmp_path.rglob("*.json")]
        assert [len(verdicts) for verdicts in kept] == [1] * len(MAKERS)
        assert all(errors and failure is None for verdicts in kept for errors, failure in verdicts.values())
    finally:
        self_check._verdicts.cache_clear()


@pytest.mark.parametrize(("T", "S"), [(57, 57), (500, 500), (5, 1500)])
@pytest.mark.parametrize("D", [64, 512])
@pytest.mark.parametrize("mean", [0, 5])
def test_linear_attention_of_16_bits(D, T, S, mean):
    assert all(error < 1e-2 for error in linear_attention_errors(torch.bfloat16, D, T, S, mean, CUDA))


ELU, DPFP = Features.named("elu"), Features.named("dpfp", 2)
HEADS = [(64, 64, ELU), (64, 64, DPFP), (64, 64, Features.named("dpfp", 3)), (16, 24, ELU), (512, 128, PLAIN)]
HEADS += [(64, 64, Features("favor", m=m, inner=64**-0.25)) for m in (128, 256)]


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize(("R", "M", "features"), HEADS, ids=lambda x: x.map if isinstance(x, Features) else str(x))
@pytest.mark.parametrize("way", [WEIGHTS, ONE_LAUNCH, PARTS, KEPT])
def test_linear_attention(way, R, M, features, dtype):
    """In every way, also that which float16 does not go."""
    width = tile_width(dtype, features.size(R), M)
    for C in (16, 32, 64) if way == WEIGHTS else (width,):
        if width < C:
            continue
        for mean, masked in ((0.0, True), (5.0, False)):
            call = Call(way, dtype, R, M, features, True, masked, C)
            errors = linear.compare(call, 3, CUDA, mean=mean)
            # The gradient of a query is a difference, of numbers that are the larger, the larger the mean.
            limit = LIMITS[dtype] / (1 if mean else 2)
            assert all(error < limit for error in errors.values()), (C, mean, errors)


@pytest.mark.parametrize("model", lm.MODELS)
def test_the_fast_way_learns_the_same(model):
    """Also with random features, which both ways draw alike from one seed as long as nothing is compiled."""
    ways = ["bf16", "graph"] if "performer" in model else ["plain", "fast"]
    found = lm.agreement(lm.random_corpus("tiny"), "tiny", model, ways, "cuda", 12)
    assert found["agree"], found["largest_difference"]
