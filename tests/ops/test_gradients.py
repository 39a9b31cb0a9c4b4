"""Exact gradients: finite differences in float64, for every rule, normalisation and backend."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fastweights as fw
from fastweights.ops import chunked
from fastweights.ops.features import MapFeatures
from fastweights.ops.rules import update_rule
from tests.ops.calls import CALLS, HERE, NORMALIZATIONS, PAIRS, random_call


def as_function(call, backend):
    """The call as a function of q, k, v, the gates and the initial state, returning y and the final state."""
    return lambda *inputs: tuple(call.with_inputs(inputs).run(backend))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
def test_gradcheck(rule, backend, normalization, monkeypatch):
    # Chunks of three, so that seven steps meet two boundaries and a short last chunk.
    monkeypatch.setattr(chunked.OPERATOR, "chunk_length", lambda D, M: 3)
    call = random_call(rule, normalization, B=2, T=7, H=1, D=3, M=2).requiring_grad()
    assert gradcheck(as_function(call, backend), call.inputs())


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", CALLS)
def test_reference_is_differentiable_twice(rule, normalization):
    call = random_call(rule, normalization, B=1, T=3, H=1, D=2, M=2).requiring_grad()
    assert gradgradcheck(as_function(call, "reference"), call.inputs())


class Scaled(fw.FeatureMap):
    """A map that learns."""

    def __init__(self, d_key):
        super().__init__(d_key)
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, d_key))

    def map(self, x):
        return (x * self.scale).relu()


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("backend", HERE)
def test_a_map_learns_also_where_nothing_else_does(backend, T):
    call, phi = random_call("delta", T=T), Scaled(5)
    q, k, v = (x.float() for x in (call.q, call.k, call.v))
    beta, mapped = call.gates["beta"].float(), [phi(x) for x in (q, k)]
    outputs = [
        fw.fast_weight_memory(q, k, v, beta=beta, backend=backend, features=MapFeatures(phi)),
        fw.fast_weight_memory(*mapped, v, beta=beta, backend="reference"),
    ]
    ours, expected = (torch.autograd.grad(y.sum() + state.W.sum(), phi.scale)[0] for y, state in outputs)
    torch.testing.assert_close(ours, expected)


def test_identity_sigma_of_1991_is_the_sum_rule():
    call = random_call("sum")
    y, W = call.run()
    call.rule = update_rule("fwp1991", sigma="identity")
    assert torch.equal(call.run()[0], y)
    assert torch.equal(call.run()[1], W)


@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta per key"])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_packed_gradcheck(backend, rule, monkeypatch):
    monkeypatch.setattr(chunked.OPERATOR, "chunk_length", lambda D, M: 3)
    call = random_call(rule, "attention", B=1, T=9, H=2, D=3, M=2)
    start = random_call(rule, "attention", B=3, H=2, D=3, M=2, seed=5)
    call.state = start.state
    call = call.requiring_grad()
    bounds = torch.tensor([0, 4, 4, 9])
    assert gradcheck(lambda *x: tuple(call.with_inputs(x).run(backend, cu_seqlens=bounds)), call.inputs())
