"""Finite in, finite out: underflow, empty memories, long sequences, low precision."""

import pytest
import torch

import fastweights as fw
from fastweights.ops.rules import RULES
from tests.ops.calls import NORMALIZATIONS, PAIRS, random_call

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
