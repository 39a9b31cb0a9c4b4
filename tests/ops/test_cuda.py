"""Every backend on the GPU against the float64 reference there: forward, final state and all gradients."""

import pytest
import torch

from fastweights.benchmarks.kernels import checks, layers
from fastweights.ops.features import Features
from fastweights.ops.gpu import self_check
from fastweights.ops.gpu.memory.self_check import SOURCE
from tests.ops.calls import FAMILY, NORMALIZATIONS, gradients, random_call, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Tests of CUDA graphs use the same leaves on several streams, and compare what comes out.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

BACKENDS = ["auto", "chunked"]
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# What the kernels take.
FUSED = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [  # B, T, H, D, M
    (2, 1, 1, 8, 8),
    (2, 7, 2, 16, 8),
    (1, 63, 2, 8, 16),
    (3, 100, 1, 32, 16),
    (2, 130, 2, 32, 32),
    (1, 300, 2, 40, 33),
    (96, 256, 8, 16, 16),
]


def on_gpu(call):
    return call.with_inputs([x.cuda() for x in call.inputs()])


def everything(call, backend, **more):
    call = call.requiring_grad()
    outputs = call.run(backend, **more)
    return [*outputs, *gradients(outputs, call.inputs())]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", FAMILY)
def test_agrees_with_float64(rule, backend, normalization, shape, dtype):
    call = on_gpu(random_call(rule, normalization, *shape)).to(dtype)
    exact = everything(call.to(torch.float64), "reference")
    assert relative_error(everything(call, backend), exact) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["sum", "gated", "decay"])
def test_additive_rules_keep_their_digits_where_values_have_a_mean(rule, dtype):
    call = random_call(rule, "attention", 3, 200, 2, 16, 16)
    call.v = call.v + 3
    call = on_gpu(call).to(dtype)
    exact = everything(call.to(torch.float64), "reference")
    assert relative_error(everything(call, "auto"), exact) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 200, 3, 128, 128)], ids=str)
@pytest.mark.parametrize("rule", ["decay log per key", "gated_delta log per key"])
def test_decays_per_key(rule, shape, dtype):
    """All but nothing at one token, and not at most: chunks of both kinds have ways of their own."""
    call = random_call(rule, None, *shape)
    call.gates["log_decay"] *= 0.05
    call.gates["log_decay"][:, 20::150] = -70.0
    call = on_gpu(call).to(dtype)
    call.gates["log_decay"] = call.gates["log_decay"].float()
    exact = everything(call.to(torch.float64), "chunked")
    assert relative_error(everything(call, "triton"), exact) < LIMITS[dtype]


@pytest.mark.parametrize("log", [-1e-7, -5.0, -100.0, -torch.inf])
def test_decays_per_key_from_all_to_nothing(log):
    call = random_call("gated_delta log per key", None, 2, 150, 2, 32, 16)
    call.gates["log_decay"] = torch.full(call.q.shape, -0.01, dtype=torch.float64)
    call.gates["log_decay"][..., ::2] = log
    call = on_gpu(call).to(torch.float32)
    exact = everything(call.to(torch.float64), "chunked")
    assert relative_error(everything(call, "triton"), exact) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [*FAMILY, "gated_delta log per key"])
def test_packed(rule, backend):
    call = random_call(rule, "attention", 1, 171, 2, 16, 8)
    call.state = random_call(rule, "attention", 5, 1, 2, 16, 8, seed=3).state
    call = on_gpu(call)
    bounds = torch.tensor([0, 5, 5, 70, 71, 171], device="cuda")
    exact = everything(call, "reference", cu_seqlens=bounds)
    found = everything(call.to(torch.float32), backend, cu_seqlens=bounds)
    assert relative_error(found, exact) < 1e-5


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize(
    ("rule", "normalization", "shape"),
    [
        ("delta", "attention", (4, 256, 4, 32, 16)),
        ("gated_delta", None, (1, 2500, 2, 64, 64)),
        ("sum", None, SHAPES[0]),
    ],
    ids=str,
)
def test_same_inputs_same_bits(rule, normalization, shape, dtype):
    call = on_gpu(random_call(rule, normalization, *shape)).to(dtype)
    first, second = everything(call, "auto"), everything(call, "auto")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("rule", ["delta", "gated"])
def test_more_sequences_than_a_second_grid_dimension_holds(rule, dtype):
    """In a batch, and the same ones packed."""
    call = on_gpu(random_call(rule, None, 70_000, 3, 1, 8, 8)).to(dtype)
    exact = everything(call.to(torch.float64), "reference")
    assert relative_error(everything(call, "triton"), exact) < LIMITS[dtype]
    tensors = [x.flatten(0, 1).unsqueeze(0) for x in (call.q, call.k, call.v, *call.gates.values())]
    bounds = torch.arange(0, 210_001, 3, device="cuda")
    y, W = call.with_inputs([*tensors, *call.state]).run("triton", cu_seqlens=bounds)
    assert relative_error([y.view_as(call.v), W], exact[:2]) < LIMITS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("rule", ["delta", "gated"])
def test_a_million_tokens(rule, dtype):
    call = on_gpu(random_call(rule, None, 1, 1_000_000, 1, 16, 16)).to(dtype)
    exact = everything(call.to(torch.float64), "chunked")
    assert relative_error(everything(call, "triton"), exact) < LIMITS[dtype]


def sliced(call):
    """q, k and v of every head side by side, as one projection gives them, gates likewise."""
    *tensors, W = call.inputs()
    sizes = [x.shape[-1] if x.dim() == 4 else 1 for x in tensors]
    whole = torch.cat([x if x.dim() == 4 else x.unsqueeze(-1) for x in tensors], -1)
    parts = whole.split(sizes, -1)
    return call.with_inputs([*(p if x.dim() == 4 else p.squeeze(-1) for p, x in zip(parts, tensors, strict=True)), W])


def heads_first(call):
    """Laid out as (B, H, T, .), the way attention likes it, also for a single token; the state by columns."""
    *tensors, W = call.inputs()
    moved = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2).copy_(x) for x in tensors]
    return call.with_inputs([*moved, W.mT.contiguous().mT])


def every_second(call):
    """Every second token, head and feature of something larger."""
    doubled = []
    for x in call.inputs():
        for dim in range(x.dim()):
            x = x.repeat_interleave(2, dim)
        doubled.append(x[tuple(slice(None, None, 2) for _ in x.shape)])
    return call.with_inputs(doubled)


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("T", [1, 100])
@pytest.mark.parametrize("layout", [sliced, heads_first, every_second])
@pytest.mark.parametrize("rule", FAMILY)
def test_any_layout(rule, layout, T, dtype):
    """With gradients and, where there is one token, also without: that goes another way."""
    call = layout(on_gpu(random_call(rule, None, 3, T, 2, 16, 16)).to(dtype))
    assert call.q.stride() != torch.empty(call.q.shape).stride()
    exact = everything(call.to(torch.float64), "reference")
    leaves = [x.detach().requires_grad_() for x in call.inputs()]
    outputs = call.with_inputs(leaves).run("triton")
    assert relative_error([*outputs, *gradients(outputs, leaves)], exact) < LIMITS[dtype]
    assert relative_error(call.run("triton"), exact[:2]) < LIMITS[dtype]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_bounds_that_are_a_slice_of_something(kind):
    call = random_call("delta", None, 1, 171, 2, 16, 16)
    call.state = random_call("delta", None, 4, 1, 2, 16, 16, seed=3).state
    call = on_gpu(call)
    bounds = torch.tensor([0, 5, 70, 71, 160], device="cuda", dtype=kind)
    exact = everything(call, "reference", cu_seqlens=bounds)
    for given in (torch.stack([bounds, bounds + 1], 1)[:, 0], torch.cat([bounds[:1], bounds])[1:]):
        assert relative_error(everything(call.to(torch.float32), "triton", cu_seqlens=given), exact) < 1e-5


def test_the_first_check_in_inference_mode(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_reasons", {})
    self_check._verdicts.cache_clear()
    try:
        # A shape that no other test has, so that nobody knows a short way to it.
        call = on_gpu(random_call("delta", None, 2, 41, 3, 24, 12)).to(torch.bfloat16)
        exact = call.to(torch.float64).run("reference")
        with torch.inference_mode():
            found = call.run("triton")
        assert relative_error(found, exact) < LIMITS[torch.bfloat16]
        (verdict,) = self_check._verdicts(call.q.device, SOURCE).values()
        assert verdict.failure is None
        assert self_check.path(call.q.device, SOURCE).exists()
    finally:
        self_check._verdicts.cache_clear()


@pytest.mark.slow
def test_packed_calls_are_replayed_with_other_bounds():
    call = random_call("gated_delta", None, 1, 171, 2, 16, 16)
    call.state = random_call("gated_delta", None, 4, 1, 2, 16, 16, seed=3).state
    call = on_gpu(call).to(torch.float32).requiring_grad()
    bounds = torch.tensor([0, 5, 70, 71, 171], device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            y = call.run("triton", cu_seqlens=bounds)[0]
            torch.autograd.grad(y.sum(), call.inputs())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call.run("triton", cu_seqlens=bounds)[0]
        grads = torch.autograd.grad(y.sum(), call.inputs())
    for other in ([0, 5, 70, 71, 171], [0, 0, 100, 171, 171], [0, 30, 31, 31, 90]):
        bounds.copy_(torch.tensor(other))
        graph.replay()
        assert not any(x[:, other[-1] :].any() for x in (y, *grads[:-1]))
        expected = call.run("triton", cu_seqlens=bounds)[0]
        assert torch.equal(y, expected)
        wanted = torch.autograd.grad(expected.sum(), call.inputs())
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_cuda_graph():
    call = on_gpu(random_call("delta", None, 4, 64, 2, 16, 16, torch.float32)).requiring_grad()
    everything(call, "auto")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            y = call.run("auto")[0]
            torch.autograd.grad(y.sum(), call.inputs())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call.run("auto")[0]
        grads = torch.autograd.grad(y.sum(), call.inputs())
    graph.replay()
    expected = call.run("auto")[0]
    assert torch.equal(y, expected)
    assert all(
        torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(expected.sum(), call.inputs()), strict=True)
    )


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("nu", [0, 1, 2, 3])
@pytest.mark.parametrize("heads", layers.HEADS)
def test_feature_maps_inside(heads, nu, dtype):
    features = Features.named("dpfp" if nu else "elu", nu, sum=True, logits=True)
    assert layers.fused_error(heads, dtype, features) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("size", [(8, 8), (32, 16), (192, 32), (512, 256)], ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", [*FAMILY, "gated_delta log per key"])
def test_one_token(rule, normalization, size, dtype):
    call = on_gpu(random_call(rule, normalization, 3, 1, 2, *size)).to(dtype)
    exact = call.to(torch.float64).run("reference")
    for more in ({}, {"in_place": True}):
        again = call.with_inputs([x.clone() for x in call.inputs()])
        assert relative_error(again.run("triton", **more), exact) < LIMITS[dtype]


@pytest.mark.parametrize("rule", FAMILY)
def test_the_second_call_is_the_same(rule):
    """It goes a shorter way."""
    call = on_gpu(random_call(rule, None, 4, 100, 2, 16, 16)).to(torch.float32)
    first, second = everything(call, "triton"), everything(call, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    moved = call.with_inputs([x + 0.01 for x in call.inputs()])
    exact = everything(moved.to(torch.float64), "reference")
    assert relative_error(everything(moved, "triton"), exact) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"feature_map": "elu"}, {"rule": "gated_delta", "feature_map": "dpfp"}], ids=str)
def test_a_whole_layer_in_a_graph(options):
    assert checks.layer_in_a_graph(**options)["right"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_and_batched_gradients():
    """torch.func and forward mode give what the reference gives; batched gradients what single ones give."""
    call = on_gpu(random_call("gated_delta", None, B=2, T=40, H=2, D=16, M=16).to(torch.float32))
    tangent = torch.randn_like(call.v)

    def run(backend):
        return lambda v: call.with_inputs([call.q, call.k, v, *call.gates.values(), *call.state]).run(backend)[0]

    ours, want = (torch.func.jvp(run(backend), (call.v,), (tangent,))[1] for backend in ("triton", "reference"))
    torch.testing.assert_close(ours, want)
    call = call.requiring_grad()
    outputs = call.run("triton")
    cotangents = [torch.randn(3, *y.shape, device="cuda") for y in outputs]
    batched = torch.autograd.grad(outputs, call.inputs(), cotangents, retain_graph=True, is_grads_batched=True)
    for i in range(3):
        single = torch.autograd.grad(outputs, call.inputs(), [c[i] for c in cotangents], retain_graph=True)
        assert relative_error([x[i] for x in batched], list(single)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
def test_what_is_not_finite_stays_in_its_row_head_text_and_mask(rule, dtype):
    T, token = 200, 70
    call = on_gpu(random_call(rule, None, 2, T, 2, 16, 16).to(dtype))
    starts = torch.zeros(2, T, dtype=torch.bool, device="cuda")
    mask = torch.ones(2, T, dtype=torch.bool, device="cuda")
    starts[0, [token + 3, 150]], mask[1, 20] = True, False
    clean = call.run("triton", starts=starts, mask=mask)
    for x in (call.q, call.k, call.v, *call.gates.values()):
        x[1, 20] = float("nan")
        x[0, token, 1] = float("nan")
    found = call.run("triton", starts=starts, mask=mask)
    y, want = found[0], clean[0]
    assert y[0, token, 1].isnan().all()
    assert torch.equal(y[1], want[1])
    assert torch.equal(y[0, :, 0], want[0, :, 0])
    # In the same chunk, decays of tokens before the start are part of sums of which only differences count.
    chunk = 80
    torch.testing.assert_close(y[0, token + 3 : chunk], want[0, token + 3 : chunk], rtol=1e-5, atol=1e-7)
    assert torch.equal(y[0, chunk:], want[0, chunk:])
    assert torch.equal(found[1], clean[1])
