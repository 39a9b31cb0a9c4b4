"""One token in one launch, in the interpreter, against the paper's equations: `test_in_the_interpreter` runs this."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.ops import family, reference
from fastweights.ops.backends import EXECUTABLES
from fastweights.ops.family import takes_logits
from fastweights.ops.features import Features
from fastweights.ops.gpu.memory import prepare, self_check
from fastweights.ops.gpu.memory.autograd import OneToken, step_op
from fastweights.ops.gpu.memory.signatures import StepSignature
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.rules import RULES, Coefficients
from fastweights.ops.spec import Inputs, Spec
from fastweights.ops.state import FastWeightState
from tests.ops.calls import FAMILY, NORMALIZATIONS, gradients, random_call, relative_error
from tests.ops.interpreted import inside, poisoned, recurrence  # noqa: F401

pytest.importorskip("triton")

DELTA = Features.named("dpfp", 1, sum=True, logits=True)


@inside
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", FAMILY)
def test_every_rule(rule, normalization):
    call = random_call(rule, normalization, B=2, T=1, H=3, D=20, M=9)
    ours, want = call.run("triton"), call.run("reference")
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@inside
@pytest.mark.parametrize(("D", "M"), [(8, 8), (5, 40), (300, 20), (512, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sizes(D, M, dtype):
    """Also more value columns than a program takes."""
    call = random_call("gated_delta", None, B=1, T=1, H=1, D=D, M=M).to(dtype)
    exact = call.to(torch.float64).run("reference")
    for a, b in zip(call.run("triton"), exact, strict=True):
        assert (a - b).norm() <= (1e-6 if dtype == torch.float32 else 1e-3) * b.norm()


@inside
@pytest.mark.parametrize(("normalization", "D", "M"), [(None, 8, 8), ("attention", 8, 8), (None, 40, 33)])
@pytest.mark.parametrize("rule", FAMILY)
def test_with_gradients_in_bfloat16(rule, normalization, D, M):
    """A walk, of float32 operands: only 16-bit ones go wrong in the interpreter."""
    call = random_call(rule, normalization, 2, 1, 1, D, M).to(torch.bfloat16)
    found = []
    for data in (call, call.to(torch.float64)):
        data = data.requiring_grad()
        problem = Inputs(RULES[rule], data.q, data.k, data.v, data.gates, *data.state)
        run = (lambda inputs: family.run(inputs, recurrence)) if data.q.dtype == torch.bfloat16 else reference.run
        outputs = [x for x in run(problem) if x is not None]
        found.append([*outputs, *gradients(outputs, data.inputs())])
    assert relative_error(*found) < 1e-2


@inside
@pytest.mark.parametrize("normalization", ["sum", "both"])
@pytest.mark.parametrize(
    ("rule", "phi"), [("delta", "dpfp"), ("gated", "elu"), ("gated_delta", "relu"), ("delta", "favor")]
)
def test_steps_are_the_sequence(rule, phi, normalization):
    """Token by token, in place or not, is the whole at once; a state that was not offered stays as it was."""
    torch.manual_seed(0)
    layer = FastWeightAttention(8, 2, 4, rule, phi, normalization, d_value=6, backend="triton").double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        want, end = layer(x)
        for in_place in (False, True):
            state, ys = None, []
            for t in range(x.shape[1]):
                before = state
                kept = None if state is None else state.clone()
                y, state = layer.step(x[:, t], state, in_place=in_place)
                ys.append(y)
                if before is not None and kept is not None:
                    assert (state.W.data_ptr() == before.W.data_ptr()) == in_place
                    assert torch.equal(before.W, kept.W) != in_place
            torch.testing.assert_close(torch.stack(ys, 1), want)
            for name, tensor in end.tensors().items():
                torch.testing.assert_close(state.tensors()[name], tensor)


@inside
def test_overwriting_is_noticed():
    """A state that some graph still needs cannot be overwritten behind its back."""
    x = torch.randn(1, 1, 1, 4, dtype=torch.float64)
    W = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    product = weight * W
    with torch.no_grad():
        fast_weight_memory(x, x, x, rule="sum", state=FastWeightState(W), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@inside
def test_gradients_take_the_walk():
    x = torch.randn(1, 1, 1, 4, dtype=torch.float64, requires_grad=True)
    problem = Inputs(RULES["sum"], x, x, x, {}, torch.zeros(1, 1, 4, 4, dtype=torch.float64))
    assert not isinstance(prepare(Spec.of(problem)), OneToken)
    with torch.no_grad():
        assert isinstance(prepare(Spec.of(problem)), OneToken)
    y, _ = fast_weight_memory(x, x, x, rule="sum", backend="triton")
    expected, _, _ = reference.run(problem)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))


@inside
@pytest.mark.parametrize("z", [False, True])
def test_as_a_custom_op(z):
    x, gate = torch.randn(2, 1, 1, 4, dtype=torch.float64), torch.randn(2, 1, 1, dtype=torch.float64)
    W = torch.randn(2, 1, 8, 4, dtype=torch.float64)
    torch.use_deterministic_algorithms(False)
    arguments = (x, x, x, None, gate, None, W, W[..., 0].abs() if z else None, True, *DELTA[:4])
    torch.library.opcheck(step_op, arguments, test_utils=("test_schema", "test_faketensor"))


@inside
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_passes_its_own_check(decay, normalized):
    kind = StepSignature(torch.float32, 8, 12, decay, True, False, True, normalized, DELTA)
    check = self_check.check_of(kind, 2)
    verdict = check.run(torch.device("cpu"))
    assert check.reason(verdict) is None
    assert list(verdict.errors)[-1].endswith("in place")


@inside
def test_a_wrong_step_fails_its_check(monkeypatch):
    right = self_check._step_plan

    def wrong(*shapes):
        def run(*tensors):
            y, *rest = right(*shapes)(*tensors)
            return y.flip(0), *rest

        return run

    monkeypatch.setattr(self_check, "_step_plan", wrong)
    kind = StepSignature(torch.float32, 8, 12, False, True, False, True, False)
    check = self_check.check_of(kind, 2)
    assert "off y by" in check.reason(check.run(torch.device("cpu")))


@inside
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", FAMILY)
def test_the_second_call_is_shorter_and_the_same(rule, T):
    """With other numbers, with and without gradients and a state; then a call that does not fit is still refused."""
    EXECUTABLES.clear()
    for seed in range(2):
        call = random_call(rule, None, B=1, T=T, H=1, D=6, M=4, seed=seed)
        without = replace(call, state=())
        for backend_call, state in ((call, FastWeightState(*call.state)), (without, None)):
            inputs = [x.detach().clone().requires_grad_() for x in backend_call.inputs()]
            found = []
            for backend in ("triton", "chunked"):
                q, k, v, *rest = inputs
                gates = dict(zip(call.gates, rest, strict=False))
                given = None if state is None else FastWeightState(inputs[-1])
                y, end = fast_weight_memory(q, k, v, rule=rule, state=given, backend=backend, **gates)
                with torch.no_grad():
                    same, _ = fast_weight_memory(q, k, v, rule=rule, state=given, backend=backend, **gates)
                torch.testing.assert_close(same, y)
                found.append([y, end.W, *torch.autograd.grad(y.sum() + end.W.square().sum(), inputs)])
            for ours, want in zip(*found, strict=True):
                torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-10)
    assert sum(backend == "triton" for _, backend in EXECUTABLES) == 4
    with pytest.raises(TypeError, match="share a dtype"):
        fast_weight_memory(q, k, v.float(), rule=rule, backend="triton", **gates)
    with pytest.raises(ValueError, match=r"state\.W must have shape"):
        state = FastWeightState(inputs[-1].new_zeros(1, 1, 6, 5))
        fast_weight_memory(q, k, v, rule=rule, state=state, backend="triton", **gates)


@inside
def test_nothing_is_held_on_to():
    x = torch.randn(1, 3, 1, 4, dtype=torch.float64)
    beta = torch.rand(1, 3, 1, dtype=torch.float64)
    fast_weight_memory(x, x, x, beta=beta, backend="triton")
    kept = [weakref.ref(tensor) for tensor in (x, beta)]
    del x, beta
    gc.collect()
    assert all(reference() is None for reference in kept)


@inside
def test_no_second_derivative_without_a_word():
    """The kernels cannot be differentiated twice: an error, not zeros."""
    x = torch.randn(1, 3, 1, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        y, _ = fast_weight_memory(x, x, x, rule="sum", backend="triton")
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.sum().backward()


@inside
@pytest.mark.parametrize("rule", ["sum", "gated", "decay"])
def test_steps_go_on_from_a_segment(rule):
    """After a segment with attention normalisation, z is a column of a larger state."""
    call = random_call(rule, "attention", 2, 6, 2, 5, 3)
    expected, *_ = call.run("reference")
    with torch.no_grad():
        y, *state = call.tokens(0, 5).run("triton")
        last = call.tokens(5, 6)
        last.state = tuple(state)
        step, *_ = last.run("triton")
    torch.testing.assert_close(torch.cat([y, step], 1), expected)


@inside
def test_one_token_may_have_more_features_than_a_walk():
    layer = FastWeightAttention(64, 1, 64, "delta", "dpfp", "sum", feature_map_options={"nu": 3}).double()
    x = torch.randn(2, 64, dtype=torch.float64)
    with torch.no_grad():
        y, state = layer.step(x)
        again, _ = layer.step(x, state)
        whole, _ = layer(torch.stack([x, x], 1))
    torch.testing.assert_close(torch.stack([y, again], 1), whole)


@inside
def test_a_rule_of_ones_own_is_mapped_first():
    """Its coefficients are no gates, so their logits cannot stand for them."""
    double = replace(RULES["delta"], name="double", coefficients=lambda beta: Coefficients(None, beta, 2 * beta))
    layer = FastWeightAttention(8, 2, 4, double, "elu").double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    expected = FastWeightAttention(8, 2, 4, double, "elu", backend="chunked").double()
    expected.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)[0], expected(x)[0])
    assert takes_logits(RULES["gated"]) and not takes_logits(double)


@inside
def test_what_autocast_changes_is_not_remembered():
    """The same call outside autocast is refused, though a call of these shapes went through before."""
    q, v = torch.randn(1, 4, 1, 4, dtype=torch.float16), torch.randn(1, 4, 1, 4)
    with torch.autocast("cpu", torch.float16):
        for _ in range(2):
            fast_weight_memory(q, q, v, rule="sum")
    with pytest.raises(TypeError, match="share a dtype"):
        fast_weight_memory(q, q, v, rule="sum")
