"""Decays per head and per key channel: what they mean, and that extreme ones do no harm."""

import math

import pytest
import torch

import fastweights as fw
from fastweights.ops.backends import BACKENDS
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs
from tests.ops.calls import HERE, gradients, random_call, refusal, relative_error

EXTREME = {
    "steep": lambda shape: torch.full(shape, -5.0),
    "as good as shut": lambda shape: torch.full(shape, -100.0),
    "some shut": lambda shape: torch.where(torch.rand(shape) < 0.2, -torch.inf, -0.01),
    "open": torch.zeros,
    # Sums over 32 tokens are on both sides of -0.5, above which the state of the C++ fades once in a chunk.
    "nearly open": lambda shape: -0.03 * torch.rand(shape),
    "all kinds": lambda shape: -5 * torch.rand(shape) ** 4,
}


def everything(tensors, name, rule, backend, dtype):
    """Outputs, final state and gradients of a call with decays of that name."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    q, k, v, decay, *beta = leaves
    gates = {name: decay, **({"beta": beta[0]} if beta else {})}
    y, state = fw.fast_weight_memory(q, k, v, rule=rule, backend=backend, **gates)
    return [y, state.W, *gradients([y, state.W], leaves)]


@pytest.mark.parametrize("channels", [(), (16,)], ids=["per head", "per key"])
@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
@pytest.mark.parametrize("kind", EXTREME)
def test_extreme_decays_are_what_float64_has(kind, rule, channels):
    """Over several chunks, as logarithms and as decays, in float32; beta up to 2."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, 2, size) for size in (16, 16, 8))
    log = EXTREME[kind]((1, 150, 2, *channels))
    k = k / k.norm(dim=-1, keepdim=True)
    more = [2 * torch.rand(1, 150, 2)] if rule == "gated_delta" else []
    for name, decay in (("log_decay", log), ("decay", log.exp())):
        exact = everything([q, k, v, decay, *more], name, rule, "reference", torch.float64)
        for backend in HERE:
            assert relative_error(everything([q, k, v, decay, *more], name, rule, backend, torch.float32), exact) < 2e-6


@pytest.mark.parametrize("channels", [(), (4,)], ids=["per head", "per key"])
@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_logarithms_near_zero_keep_their_digits(backend, channels):
    """Decays themselves are off by up to 3 % of a logarithm of -1e-6, and over 20,000 steps by a thousandth."""
    x, log = torch.zeros(1, 20_000, 1, 4), torch.full((1, 20_000, 1, *channels), -1e-6)
    state = fw.FastWeightState(torch.ones(1, 1, 4, 4))
    _, end = fw.fast_weight_memory(x, x, x, rule="decay", log_decay=log, state=state, backend=backend)
    torch.testing.assert_close(end.W, torch.full_like(end.W, math.exp(-0.02)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_logarithms_near_zero_keep_the_digits_of_gradients(backend):
    """Of a state so large that the C++ goes back through a whole chunk at once, not through four tokens at a time."""
    x, log = torch.zeros(1, 20_000, 1, 40), torch.full((1, 20_000, 1), -1e-6)
    W = torch.ones(1, 1, 40, 40, requires_grad=True)
    state = fw.FastWeightState(W)
    _, end = fw.fast_weight_memory(x, x, x, rule="decay", log_decay=log, state=state, backend=backend)
    (dW,) = torch.autograd.grad(end.W.sum(), W)
    torch.testing.assert_close(dW, torch.full_like(dW, math.exp(-0.02)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_the_same_decay_for_every_channel_is_one_for_the_head(rule):
    call = random_call(rule, "attention", 2, 50, 2, 5, 3)
    expected = call.run("reference")
    call.gates["decay"] = call.gates["decay"].unsqueeze(-1).expand(*call.q.shape)
    for backend in HERE:
        assert relative_error(call.run(backend), expected) < 1e-12


def test_kimi_delta_attention_by_its_definition():
    """W <- (I - beta k k^T) Diag(a) W + beta k v^T."""
    call = random_call("gated_delta per key", None, 1, 6, 1, 4, 3)
    W, identity = call.state[0][0, 0], torch.eye(4, dtype=torch.float64)
    outputs = []
    for t in range(6):
        q, k, v, decay, beta = (x[0, t, 0] for x in (call.q, call.k, call.v, call.gates["decay"], call.gates["beta"]))
        W = (identity - beta * torch.outer(k, k)) @ torch.diag(decay) @ W + beta * torch.outer(k, v)
        outputs.append(q @ W)
    for backend in HERE:
        y, end = call.run(backend)
        torch.testing.assert_close(y[0, :, 0], torch.stack(outputs))
        torch.testing.assert_close(end[0, 0], W)


def test_gpu_kernels_take_decays_per_key_as_logarithms():
    """The gradient of a decay is that of its logarithm over the decay, which has no digits left for small ones."""
    call = random_call("gated_delta per key", dtype=torch.float32)
    inputs = Inputs(RULES["gated_delta"], call.q, call.k, call.v, call.gates, *call.state)
    assert "under the name log_decay" in refusal(BACKENDS["triton"], inputs)
    inputs.gates["log_decay"] = inputs.gates.pop("decay").log()
    assert "log_decay" not in refusal(BACKENDS["triton"], inputs)
