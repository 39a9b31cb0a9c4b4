"""Finite in, finite out: underflow, empty memories, long sequences, low precision."""

import copy
from dataclasses import replace

import pytest
import torch

import fastweights as fw
from fastweights.ops import family
from fastweights.ops.features import Features
from fastweights.ops.gpu.memory.variants import TABLE
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs
from tests.ops import emulated_kernels
from tests.ops.calls import (
    FAMILY,
    HERE,
    NORMALIZATIONS,
    PAIRS,
    gradients,
    linear_attention_errors,
    random_call,
    relative_error,
)
from tests.ops.interpreted import as_fused

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
def test_vanishing_keys_give_finite_outputs_and_gradients(rule, backend, normalization, scale):
    """An all-zero phi(k), an empty memory and features that underflow never meet 0 / 0."""
    call = random_call(rule, normalization, 2, 40, 2, 4, 3, torch.float32)
    call.k, call.q = call.k * scale, call.q * scale
    call.state = tuple(x * 0 for x in call.state)
    call = call.requiring_grad()
    outputs = call.run(backend)
    grads = torch.autograd.grad(sum(out.sum() for out in outputs), call.inputs())
    assert all(x.isfinite().all() for x in (*outputs, *grads))


@pytest.mark.parametrize("normalize", [fw.sum_normalize, fw.l2_normalize])
@pytest.mark.parametrize("dtype", DTYPES)
def test_normalisations_are_safe_at_zero(normalize, dtype):
    x = torch.tensor([[0.0, 0.0], [1.0, -1.0], [1e-7, 1e-7], [3.0, 1.0]], dtype=dtype, requires_grad=True)
    out = normalize(x)
    assert out.dtype == dtype
    assert not out[0].any()
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_ten_thousand_steps_stay_finite(normalization, dtype):
    torch.manual_seed(0)
    q, k = (fw.sum_normalize(torch.rand(1, 10_000, 1, 8)).to(dtype) for _ in range(2))
    v, beta = torch.randn(1, 10_000, 1, 8).to(dtype), torch.rand(1, 10_000, 1).to(dtype)
    y, state = fw.fast_weight_memory(q, k, v, beta=beta, normalization=normalization)
    assert y.isfinite().all()
    assert state.W.isfinite().all()
    if normalization is None:
        # With sum-normalised keys the delta rule mixes values: nothing it reads can outgrow them by much.
        assert y.abs().max() < 10 * v.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_large_finite_inputs_in_half_precision(rule, dtype):
    """Sums that would overflow 16 bits are kept in 32."""
    call = random_call(rule, "attention", 1, 300, 1, 8, 4, torch.float64).to(dtype)
    call.v = call.v * 1000
    y, W, z = call.run("auto")
    assert y.isfinite().all()
    assert W.isfinite().all()
    assert z.isfinite().all()


def recurrence_in_16_bits(q, k, v, a, e, w, W, packed, dtype):
    """The sum rule with W and the gradient of y rounded to bfloat16 where products take them, as tensor cores do."""

    def rounded(x):
        return x + (x.bfloat16().to(x.dtype) - x).detach()

    q, k, v = (x.to(dtype) for x in (q, k, v))
    states = W.unsqueeze(1) + torch.einsum("bthd,bthm->bthdm", k, v).cumsum(1)
    y = torch.einsum("bthd,bthdm->bthm", q, rounded(states))
    if y.requires_grad:
        y.register_hook(lambda grad: grad.bfloat16().to(grad.dtype))
    return y, states[:, -1]


@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
def test_queries_keep_their_gradients_where_values_have_a_mean(mean):
    """dq is what is left of two numbers as large as the mean."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.elu(torch.randn(4, 256, 2, 16)).add(1).bfloat16() for _ in range(2))
    v = (torch.randn(4, 256, 2, 16) + mean * torch.randn(4, 1, 2, 16)).bfloat16()
    dy = torch.randn(4, 256, 2, 16).bfloat16()
    W, z = torch.zeros(4, 2, 16, 16), torch.zeros(4, 2, 16)
    ours = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in ours]
    y, *state = family.run(Inputs(RULES["sum"], *ours, {}, W, z), recurrence_in_16_bits)
    want, wanted = fw.fast_weight_memory(*exact, rule="sum", normalization="attention", backend="reference")
    pairs = [(y, want), *zip(state, wanted.tensors().values(), strict=True)]
    pairs += zip(torch.autograd.grad(y, ours, dy), torch.autograd.grad(want, exact, dy.double()), strict=True)
    for found, wanted in pairs:
        assert (found.double() - wanted).norm() < 1.5e-2 * wanted.norm()


def in_kernels(call):
    """Outputs of a call as the kernels round them."""
    problem = Inputs(RULES[call.rule], call.q, call.k, call.v, call.gates, *call.state)
    return [x for x in family.run(problem, emulated_kernels.recurrence) if x is not None]


def everything(call, run, **how):
    call = call.requiring_grad()
    outputs = run(call)
    return [*outputs, *gradients(outputs, call.inputs(), **how)]


def reference(call):
    return call.run("reference")


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", FAMILY)
def test_without_roundings_the_emulated_kernels_are_exact(rule, normalization, fused, monkeypatch):
    row = TABLE[torch.float64][512, 256]
    row = replace(as_fused(row), prefetch=True) if fused else row
    monkeypatch.setattr(emulated_kernels, "configuration", lambda *_: row)
    call = random_call(rule, normalization, 2, 37, 2, 5, 3)
    assert relative_error(everything(call, in_kernels), everything(call, reference)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(1, 63, 2, 8, 16), (1, 300, 2, 40, 33)])
@pytest.mark.parametrize("rule", FAMILY)
def test_attention_normalisation_in_16_bits(rule, shape, seed):
    """Every gradient to 1 %, also those that are the difference of what is read and what it is divided by."""
    call = random_call(rule, "attention", *shape, seed=seed).to(torch.bfloat16)
    exact = everything(call.to(torch.float64), reference)
    # What is computed in float32 has lost no more than dy and the results. Comba divides a product of two gates.
    limits = {"gated_delta": 5e-3, "comba": 2e-2}
    assert relative_error(everything(call, in_kernels), exact) < limits.get(rule, 1e-2)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", FAMILY)
def test_one_token_in_16_bits(rule, normalization):
    """Gradients of two gates to 1 %, however little of the sums that they are is left."""
    for seed in range(40):
        call = random_call(rule, normalization, 2, 1, 1, 8, 8, seed=seed).to(torch.bfloat16)
        exact = everything(call.to(torch.float64), reference, exact_in=torch.bfloat16)
        found = everything(call, in_kernels, exact_in=torch.bfloat16)
        assert relative_error(found, exact) < 1e-2, seed


def test_what_is_no_number_does_not_reach_tokens_before_it():
    q, k, v = torch.rand(3, 1, 20, 1, 4).bfloat16()
    v[0, 18, 0, 1] = torch.inf
    problem = Inputs(RULES["sum"], q, k, v, {}, torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4))
    y = family.run(problem, recurrence_in_16_bits)[0]
    assert y[:, :18].isfinite().all() and not y[:, 18:, :, 1].isfinite().any()


@pytest.mark.parametrize("T", [2, 15, 16, 256])
@pytest.mark.parametrize("height", [1e2, 1e5])
def test_a_value_that_stands_out_does_not_cost_those_before_it_their_digits(T, height):
    torch.manual_seed(0)
    q, k, v = torch.rand(2, T, 2, 8).bfloat16(), torch.rand(2, T, 2, 8).bfloat16(), torch.randn(2, T, 2, 8).bfloat16()
    v[:, -1] = height
    W, z = torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8)
    y = family.run(Inputs(RULES["sum"], q, k, v, {}, W, z), recurrence_in_16_bits)[0]
    exact = [x.double() for x in (q, k, v)]
    want, _ = fw.fast_weight_memory(*exact, rule="sum", normalization="attention", backend="reference")
    assert (y[:, :-1].double() - want[:, :-1]).norm() < 1e-2 * want[:, :-1].norm()


@pytest.mark.parametrize(("T", "S"), [(9, 9), (57, 57), (300, 300), (5, 1500)])
@pytest.mark.parametrize("D", [64, 512])
@pytest.mark.parametrize("mean", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_attention_keeps_its_digits_where_values_have_a_mean(dtype, D, T, S, mean):
    """With weights, and with a memory: off by no more than a few roundings of the result, in y and every gradient."""
    assert all(error < 1e-2 for error in linear_attention_errors(dtype, D, T, S, mean))


@pytest.mark.parametrize("S", [20, 40, 500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_no_query_finds_costs_linear_attention_no_digits(dtype, S):
    q, k, v = torch.rand(1, 5, 2, 64), torch.rand(1, S, 2, 64), torch.randn(1, S, 2, 64)
    k[:, -1], v[:, -1] = 0, 6e4
    q, k, v = (x.to(dtype) for x in (q, k, v))
    found, wanted = fw.linear_attention(q, k, v), fw.linear_attention(q, k[:, :-1], v[:, :-1])
    if dtype == torch.bfloat16:
        assert (found - wanted).norm() < 5e-3 * wanted.norm()
    else:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("name", ["dpfp", "elu"])
def test_small_features_in_float16_keep_their_gradients(name, backend):
    """Features of 1e-6 that are divided by their sum have gradients of 1e6, more than float16 holds."""
    torch.manual_seed(0)
    raw = 1e-3 * torch.randn(2, 1, 6, 2, 3) if name == "dpfp" else -14 + torch.rand(2, 1, 6, 2, 3)
    features = Features.named(name, nu=int(name == "dpfp"), sum=True)
    exact = [x.half().double() for x in (*raw, torch.randn(1, 6, 2, 4))]
    found = []
    for dtype in (torch.float16, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in exact]
        y, _ = fw.fast_weight_memory(*inputs, rule="sum", normalization="attention", features=features, backend=backend)
        found.append(torch.autograd.grad(y.double().square().sum(), inputs))
    assert relative_error(*found) < 0.02


def test_small_features_of_a_layer_in_float16_keep_their_gradients():
    torch.manual_seed(0)
    layer = fw.FastWeightAttention(8, 2, feature_map="dpfp", normalization="both", rule="sum").half()
    x = (1e-3 * torch.randn(1, 6, 8)).half()
    found = []
    for kind in (layer, copy.deepcopy(layer).double()):
        y, _ = kind(x.to(kind.out.weight.dtype))
        found.append(torch.autograd.grad(1e3 * y.double().square().sum(), kind.project.weight))
    assert relative_error(*found) < 0.02


@pytest.mark.parametrize("backend", HERE)
def test_a_memory_that_has_nearly_faded_has_gradients_in_float16(backend):
    """Queries find the first key only, which has faded to 1e-7: features have gradients of 1e7, raw queries do not."""
    torch.manual_seed(0)
    q, k = 0.5 + torch.rand(2, 1, 10, 1, 2)
    k[:, 1:] *= -1
    exact = [x.half().double() for x in (q, k, torch.randn(1, 10, 1, 4), torch.full((1, 10, 1), 0.15))]
    features = Features.named("dpfp", nu=2, sum=True)
    found = []
    for dtype in (torch.float16, torch.float64):
        *inputs, decay = (x.to(dtype).requires_grad_() for x in exact)
        options = {"rule": "decay", "normalization": "attention", "features": features, "backend": backend}
        y, _ = fw.fast_weight_memory(*inputs, decay=decay, **options)
        assert y.dtype == dtype
        found.append([y, *torch.autograd.grad(y.double().square().sum(), [*inputs, decay])])
    assert relative_error(*found) < 0.02


@pytest.mark.parametrize("scale", [1e-33, 1e33])
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_values_of_any_size_survive_a_memory_that_fades_fast(rule, backend, scale):
    """Whatever is divided on the way stays within the range of float32."""
    call = random_call(rule, None, 1, 40, 1, 4, 3)
    call.gates["decay"] = torch.full_like(call.gates["decay"], 0.2)
    call.v, call.state = scale * call.v, (scale * call.state[0],)
    found = call.to(torch.float32).run(backend)
    wanted = call.run("reference")
    assert relative_error([x / scale for x in found], [x / scale for x in wanted]) < 1e-5
