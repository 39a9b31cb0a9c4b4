"""Derivatives of every kind: forward mode, torch.func, batched gradients, on every backend."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fastweights as fw
from fastweights.ops import operator
from tests.ops.calls import NORMALIZATIONS, PAIRS, random_call

BACKENDS = ["chunked", "cpu", "auto"]
# From inside torch, when its rules for tangents are first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def function(call, backend, **more):
    """The call as a function of its tensors."""
    return lambda *inputs: tuple(call.with_inputs(inputs).run(backend, **more))


def expected_tangents(call, tangents):
    """What the outputs change by, from gradients: a·(J t) = (J^T a)·t, for unit vectors a."""
    call = call.requiring_grad()
    tangent_of = []
    for output in call.run("reference"):
        rows = []
        for unit in torch.eye(output.numel(), dtype=output.dtype):
            inputs = torch.autograd.grad(output, call.inputs(), unit.view(output.shape), True, allow_unused=True)
            rows.append(sum((g * t).sum() for g, t in zip(inputs, tangents, strict=True) if g is not None))
        tangent_of.append(torch.stack(rows).view(output.shape))
    return tangent_of


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), [*PAIRS, ("delta", "auto"), ("schlag2021", "auto")])
def test_forward_mode(rule, backend, normalization):
    call = random_call(rule, normalization, B=1, T=4, H=1, D=3, M=2)
    tangents = tuple(torch.randn_like(x) for x in call.inputs())
    wanted = expected_tangents(call, tangents)
    _, by_func = jvp(function(call, backend), tuple(call.inputs()), tangents)
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, t) for x, t in zip(call.inputs(), tangents, strict=True)]
        by_hand = [forward_ad.unpack_dual(y).tangent for y in function(call, backend)(*dual)]
    torch.testing.assert_close(list(by_func), wanted)
    torch.testing.assert_close(by_hand, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_func_agrees_with_autograd(backend):
    call = random_call("gated_delta", "attention", B=1, T=9, H=2, D=3, M=2)
    run = function(call, backend)
    tracked = call.requiring_grad()
    wanted = torch.autograd.grad(sum(y.square().sum() for y in tracked.run("reference")), tracked.inputs())

    def loss(*inputs):
        return sum(y.square().sum() for y in run(*inputs))

    every = tuple(range(len(wanted)))
    torch.testing.assert_close(grad(loss, every)(*call.inputs()), wanted)
    torch.testing.assert_close(vjp(loss, *call.inputs())[1](torch.ones((), dtype=torch.float64)), wanted)
    torch.testing.assert_close(jacrev(loss, every)(*call.inputs()), wanted)
    torch.testing.assert_close(jacfwd(loss, 2)(*call.inputs()), wanted[2])
    torch.testing.assert_close(
        hessian(loss, 2)(*call.inputs()),
        torch.autograd.functional.hessian(
            lambda v: sum(
                y.square().sum() for y in call.with_inputs([*call.inputs()[:2], v, *call.inputs()[3:]]).run()
            ),
            call.v,
        ),
    )


@pytest.mark.parametrize("options", [{}, {"feature_map": "dpfp", "normalization": "both"}, {"rule": "gated_delta"}])
def test_per_sample_gradients_of_a_layer(options):
    layer = fw.FastWeightAttention(8, 2, **options).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x[None],))[0].square().sum()

    found = vmap(grad(loss), (None, 0))({name: p.detach() for name, p in parameters.items()}, x)
    for i in range(3):
        wanted = torch.autograd.grad(layer(x[i : i + 1])[0].square().sum(), list(parameters.values()))
        for name, exact in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(found[name][i], exact)


def test_vmap_of_masks_starts_and_states():
    """What vmap maps over may be any tensor of a call, packed sequences included."""
    call = random_call("gated_delta", B=1, T=6, H=2, D=3, M=2)
    mask, starts = torch.rand(4, 1, 6) < 0.7, torch.rand(4, 1, 6) < 0.3
    mapped = vmap(lambda mask, starts: call.run("auto", mask=mask, starts=starts)[0])(mask, starts)
    for i in range(4):
        torch.testing.assert_close(mapped[i], call.run("reference", mask=mask[i], starts=starts[i])[0])
    bounds = torch.tensor([0, 2, 6])
    values = torch.randn(3, *call.v.shape, dtype=torch.float64)
    W = torch.randn(2, 2, 3, 2, dtype=torch.float64)

    def packed(v):
        state = fw.FastWeightState(W)
        return fw.fast_weight_memory(
            call.q, call.k, v, rule="gated_delta", cu_seqlens=bounds, state=state, **call.gates
        )

    torch.testing.assert_close(vmap(lambda v: packed(v)[0])(values), torch.stack([packed(v)[0] for v in values]))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", ["sum", "delta", "gated_delta"])
@pytest.mark.parametrize(("backend", "H"), [*((name, 2) for name in BACKENDS), ("cpu", 1)])
def test_batched_gradients(backend, H, rule, normalization):
    call = random_call(rule, normalization, B=2, T=40, H=H, D=3, M=2).requiring_grad()
    outputs = call.run(backend)
    cotangents = [torch.randn(5, *y.shape, dtype=torch.float64) for y in outputs]
    found = torch.autograd.grad(outputs, call.inputs(), cotangents, retain_graph=True, is_grads_batched=True)
    for i in range(5):
        wanted = torch.autograd.grad(outputs, call.inputs(), [c[i] for c in cotangents], retain_graph=True)
        torch.testing.assert_close([x[i] for x in found], list(wanted))
    # Also where only the final state was asked about, and where sequences are packed.
    (only,) = torch.autograd.grad(outputs[1], call.v, cotangents[1], retain_graph=True, is_grads_batched=True)
    for i in range(5):
        wanted = torch.autograd.grad(outputs[1], call.v, cotangents[1][i], retain_graph=True)[0]
        torch.testing.assert_close(only[i], wanted)


def test_batched_gradients_of_many_heads(monkeypatch):
    """More than are run at once."""
    monkeypatch.setattr(operator, "_MOST_HEADS", 4)
    call = random_call("delta", B=1, T=5, H=2, D=3, M=2).requiring_grad()
    y = call.run("cpu")[0]
    cotangents = torch.randn(5, *y.shape, dtype=torch.float64)
    found = torch.autograd.grad(y, call.inputs(), cotangents, retain_graph=True, is_grads_batched=True)
    for i in range(5):
        wanted = torch.autograd.grad(y, call.inputs(), cotangents[i], retain_graph=True)
        torch.testing.assert_close([x[i] for x in found], list(wanted))


def test_batched_gradients_of_packed_sequences():
    call = random_call("gated_delta", B=1, T=9, H=2, D=3, M=2).requiring_grad()
    state = fw.FastWeightState(torch.randn(3, 2, 3, 2, dtype=torch.float64, requires_grad=True))
    bounds = torch.tensor([0, 4, 4, 9])
    y, _ = fw.fast_weight_memory(
        call.q, call.k, call.v, rule="gated_delta", cu_seqlens=bounds, state=state, backend="chunked", **call.gates
    )
    inputs = [call.q, call.k, *call.gates.values(), state.W]
    cotangents = torch.randn(4, *y.shape, dtype=torch.float64)
    found = torch.autograd.grad(y, inputs, cotangents, retain_graph=True, is_grads_batched=True)
    for i in range(4):
        wanted = torch.autograd.grad(y, inputs, cotangents[i], retain_graph=True)
        torch.testing.assert_close([x[i] for x in found], list(wanted))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_of_a_gradient_is_never_lost(backend, which):
    """The forward pass was outside the dual level, so kernels run the backward pass: an error, not no tangent."""
    call = random_call("delta", B=1, T=6, H=1, D=3, M=2).requiring_grad()
    output = call.run(backend)[which]
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
        with pytest.raises(NotImplementedError, match="run its forward pass inside the dual level too"):
            torch.autograd.grad(output, call.v, cotangent)
