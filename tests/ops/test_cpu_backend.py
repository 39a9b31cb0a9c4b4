"""The C++ backend beyond what all backends are tested for: its threads, its chunks, its place in PyTorch."""

import math
import mmap
from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from fastweights.ops import family
from fastweights.ops.cpu import backend as cpu
from fastweights.ops.cpu import build
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs
from tests.ops.calls import BY_FORM, FAMILY, NORMALIZATIONS, gradients, random_call, refusal, relative_error
from tests.ops.interpreted import poisoned  # noqa: F401

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def run(call, cu_seqlens=None):
    """[y, W] or [y, W, z] of a call, by the C++."""
    problem = Inputs(RULES[call.rule], call.q, call.k, call.v, call.gates, *call.state)
    return [x for x in family.run(replace(problem, cu_seqlens=cu_seqlens), cpu.recurrence) if x is not None]


def everything(call, cu_seqlens=None):
    call = call.requiring_grad()
    outputs = run(call, cu_seqlens)
    return [*outputs, *gradients(outputs, call.inputs())]


def expected(call, **more):
    call = call.requiring_grad()
    outputs = call.run("reference", **more)
    return [*outputs, *gradients(outputs, call.inputs())]


def packed_call(T, bounds, *sizes, rule="gated_delta"):
    call = random_call(rule, "attention", 1, T, *sizes)
    call.state = random_call(rule, "attention", len(bounds) - 1, 1, *sizes, seed=3).state
    return call, torch.tensor(bounds)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", [*FAMILY, *BY_FORM])
def test_gradcheck_across_chunks(rule, normalization, monkeypatch):
    monkeypatch.setattr(cpu.OPERATOR, "chunk_length", lambda D, M: 3)
    call = random_call(rule, normalization, B=2, T=7, H=1, D=3, M=2).requiring_grad()
    assert gradcheck(lambda *inputs: tuple(call.with_inputs(inputs).run("cpu")), call.inputs())


@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta per key"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 50])
@pytest.mark.parametrize("threads", [1, 7])
def test_any_chunk(chunk, threads, rule, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr(cpu.OPERATOR, "chunk_length", lambda D, M: chunk)
    call = random_call(rule, "attention", 1, 49, 2, 21, 19)
    assert relative_error(everything(call), expected(call)) < 1e-12


@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta per key"])
@pytest.mark.parametrize(("D", "M"), [(1, 1), (64, 64), (17, 48), (80, 7), (130, 100)])
def test_sizes(D, M, rule):
    """One vector, whole vectors, a few features over, more than a tile."""
    call = random_call(rule, None, 1, 100, 2, D, M)
    assert relative_error(everything(call), expected(call)) < 1e-12
    assert relative_error(everything(call.to(torch.float32)), expected(call)) < 1e-5


@pytest.mark.parametrize("rule", [*FAMILY, "gated_delta log", "gated_delta per key"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("T", "D", "M", "group"), [(1, 64, 64, 1), (31, 33, 35, 1), (65, 60, 99, 2), (130, 96, 64, 3)])
def test_bfloat16(T, D, M, group, normalization, rule):
    """What is multiplied may be rounded to bfloat16, too, in pairs of tokens, features or columns."""
    call = random_call(rule, normalization, 2, T, 6, D, M).to(torch.bfloat16)
    call.q, call.k = call.q[:, :, ::group], call.k[:, :, ::group]
    assert relative_error(everything(call), expected(call.to(torch.float64))) < 1e-2
    bounds = torch.tensor([0, T // 3, T])
    packed = replace(call.tokens(0, T), **{name: getattr(call, name)[:1] for name in "qkv"})
    packed.gates = {name: x[:1] for name, x in call.gates.items()}
    found, wanted = everything(packed, bounds), expected(packed.to(torch.float64), cu_seqlens=bounds)
    assert relative_error(found, wanted) < 1e-2


def test_packed():
    call, bounds = packed_call(171, [0, 0, 5, 5, 70, 71, 171, 171], 2, 16, 8)
    assert relative_error(everything(call, bounds), expected(call, cu_seqlens=bounds)) < 1e-12


@pytest.mark.parametrize("shape", [(1, 200, 1, 20, 70), (1, 90, 3, 64, 64), (5, 40, 3, 8, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta per key"])
def test_the_number_of_threads_changes_no_bit(shape, dtype, rule):
    """Fewer heads than threads, where the work is shared out another way, included."""
    call = random_call(rule, "attention", *shape, dtype=dtype)
    results = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        results.append(everything(call))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_packed_on_many_threads():
    call, bounds = packed_call(171, [0, 0, 5, 5, 70, 71, 171, 171], 1, 16, 40)
    one = everything(call, bounds)
    torch.set_num_threads(9)
    assert all(torch.equal(a, b) for a, b in zip(everything(call, bounds), one, strict=True))


@pytest.mark.parametrize(("D", "M", "dtype"), [(5, 3, torch.float64), (35, 33, torch.bfloat16)])
def test_nan_stays_in_its_sequence(D, M, dtype):
    """The room in which a thread computes goes from one sequence to the next."""
    call = random_call("gated_delta", None, 3, 70, 1, D, M, dtype)
    clean = everything(call)
    call.k[0, 20], call.v[0, 30] = float("nan"), float("inf")
    spoilt = everything(call)
    assert spoilt[0][0].isnan().any()
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(clean, spoilt, strict=True))


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), float("-inf")])
def test_says_whether_results_are_finite(value):
    """Of positive numbers and one other, which goes into sums only, so that infinities do not become NaN."""
    q, k, v, dy = torch.rand(4, 1, 9, 1, 5)
    v[0, 6, 0, 2] = value
    tokens = q, k, v, None, None, None
    y, _, before, finite = cpu.forward(tokens, torch.rand(1, 1, 5, 5), None, False, torch.float32, True, 8)
    assert y.isnan().any() == math.isnan(value) and finite == y.isfinite().all() == math.isfinite(value)
    (dq, dk, *_), finite = cpu.backward(dy, None, tokens, before, None, False, 8)
    assert dq.isnan().any() == math.isnan(value)
    assert finite == dq.isfinite().all() == dk.isfinite().all() == math.isfinite(value)


@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta per key"])
def test_decay_of_zero_and_of_any_sign(rule):
    call = random_call(rule, None, 2, 100, 2, 8, 8)
    call.gates["decay"] = (call.gates["decay"] - 0.5) * 2
    call.gates["decay"][:, ::9] = 0
    assert relative_error(everything(call), expected(call)) < 1e-12


def far_apart(x):
    """x with its rows in time further apart than 32 bits count, in memory of which little is ever there."""
    step = 2**31 + 1
    size = ((x.shape[1] - 1) * step + x[:, 0].numel()) * x.element_size()
    no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.11 does not name: the system may promise more than there is
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    strides = (x[0, 0].numel(), step, *x[0, 0].stride())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("chunk", [1, 2])
def test_offsets_of_64_bits(chunk):
    """Of everything that is read, and everything that is written."""
    x = random_call("gated_delta per key", None, 1, 2, 2, 5, 4, torch.bfloat16)
    a, e, w = RULES["gated_delta"].coefficients(**x.gates)
    near = {"q": x.q, "k": x.k, "v": x.v, "a": a, "e": e, "w": w, "y": torch.empty_like(x.v)}
    far = {name: far_apart(tensor) for name, tensor in near.items()}
    results = []
    for place, views in ((torch.empty_like, near), (far_apart, far)):
        (W,) = x.state
        W_end, before = torch.empty_like(W), W.new_empty(2 // chunk, *W.shape[1:])
        assert cpu._call("fastweights_forward", chunk, False, None, views, W=W, W_end=W_end, before=before)
        grads = {f"d{name}": place(views[name]) for name in ("q", "k", "v", "a", "e", "w")}
        y, dW = views.pop("y"), torch.empty_like(W)
        states = {"before": before, "dW_end": W_end, "dW_start": dW}
        assert cpu._call("fastweights_backward", chunk, False, None, {**views, "dy": y, **grads}, **states)
        results.append([y, W_end, dW, *grads.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def off_by_one(x):
    """x with rows that start in the middle of a vector."""
    return torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)[..., 1:].copy_(x)


@pytest.mark.parametrize("place", [torch.clone, off_by_one, far_apart])
@pytest.mark.parametrize(("dtype", "M"), [(torch.float32, 32), (torch.float64, 32), (torch.bfloat16, 64)])
def test_rows_that_are_copied_or_read_where_they_lie(dtype, M, place):
    """Those of a chunk with a quad that lacks tokens are copied, and give the same bits."""
    T = 4 if place is far_apart else 60
    call = random_call("gated_delta", None, 1, T + 1, 2, 32, M, dtype)
    whole = run(call)[0]
    call.q, call.k, call.v = (place(x[:, :T]) for x in (call.q, call.k, call.v))
    call.gates = {name: x[:, :T] for name, x in call.gates.items()}
    assert torch.equal(run(call)[0], whole[:, :T])
    wanted = call.to(torch.float64).run("reference")
    assert relative_error(run(call), wanted) < (2**-7 if dtype == torch.bfloat16 else 100 * torch.finfo(dtype).eps)


def test_only_the_state_gets_a_gradient():
    """No gradient comes in for y; and the other way round."""
    call = random_call("delta", None, 2, 70, 2, 4, 3).requiring_grad()
    for output in (0, 1):
        found, wanted = run(call)[output], call.run("reference")[output]
        grads = (torch.autograd.grad(x.square().sum(), call.inputs(), allow_unused=True) for x in (found, wanted))
        found_grads, wanted_grads = ([torch.zeros(()) if x is None else x for x in xs] for xs in grads)
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(found_grads, wanted_grads, strict=True))


@pytest.mark.parametrize("T", [256, 1024, 4096])
def test_saves_inputs_and_one_state_per_chunk(T):
    H, D, M = 2, 64, 48
    call = random_call("delta", None, 1, T, H, D, M, torch.float32).requiring_grad()
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = run(call)
    assert outputs[0].requires_grad
    inputs, states = T * (2 * D + M + 1), (T // cpu.chunk_length(D, M) + 1) * D * M
    assert sum(storages.values()) <= 4 * H * (inputs + states)


def op_inputs(rule, packed, grad):
    call = random_call(rule, B=1 if packed else 2, T=9, H=2, D=3, M=2, dtype=torch.float32)
    floats = [call.q, call.k, call.v, *RULES[rule].coefficients(**call.gates), torch.rand(2, 2, 3, 2)]
    floats = [x if x is None else x.detach().clone().requires_grad_(grad) for x in floats]
    return [*floats, torch.tensor([0, 4, 9]) if packed else None, torch.float32, True, 4, False]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", FAMILY)
def test_opcheck(rule, packed):
    torch.library.opcheck(cpu.OPERATOR.op, op_inputs(rule, packed, grad=True))
    inputs = op_inputs(rule, packed, grad=False)
    y, W, before = cpu.OPERATOR.forward(inputs[:6], *inputs[6:])
    for dW in (W, None):
        torch.library.opcheck(cpu.OPERATOR.backward_op, (y, dW, *inputs[:6], before, inputs[7], 4, False))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_graph_breaks(packed):
    call, bounds = packed_call(40, [0, 7, 33], 2, 4, 3) if packed else (random_call("delta", "attention"), None)
    call = call.requiring_grad()

    def function(*inputs):
        moved = call.with_inputs(inputs)
        problem = Inputs(RULES[call.rule], moved.q, moved.k, moved.v, moved.gates, *moved.state, cu_seqlens=bounds)
        assert cpu.BACKEND.unavailable() is None
        assert refusal(cpu.BACKEND, problem) is None
        return family.run(problem, cpu.recurrence)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*call.inputs())
    found = [*compiled, *gradients(compiled, call.inputs())]
    assert relative_error(found, everything(call, bounds)) < 1e-12


def test_no_second_backward():
    call = random_call("delta").requiring_grad()
    (dq,) = torch.autograd.grad(run(call)[0].sum(), call.q, create_graph=True)
    # Also beside a term that has a gradient, and by whichever input: nothing must be left out.
    for x in call.inputs():
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(dq.sum() + x.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (dq.sum() + call.q.sum()).backward()


def problem(rule="delta"):
    call = random_call(rule)
    return Inputs(RULES[rule], call.q, call.k, call.v, call.gates, *call.state)


def test_what_it_refuses():
    assert refusal(cpu.BACKEND, problem()) is None
    assert "outside the family" in refusal(cpu.BACKEND, problem("fwp1991"))
    elsewhere = replace(problem(), q=torch.empty(2, 7, 2, 5, device="meta"))
    assert "the tensors are on meta" in refusal(cpu.BACKEND, elsewhere)


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (1, torch.rand(2, 9, 2, 4), r"k must have shape \(2, 9, 2, 3\)"),
        (2, torch.rand(2, 8, 2, 2), r"v must have shape \(2, 9, 2, 2\)"),
        (4, torch.rand(2, 9, 3), r"e must have shape \(2, 9, 2\)"),
        (6, torch.rand(3, 2, 3, 2), r"W must be torch.float32 of shape \(2, 2, 3, 2\)"),
        (6, torch.rand(2, 2, 3, 2).bfloat16(), "must be float32 or float64"),
    ],
    ids=["k", "v", "e", "W", "dtype"],
)
def test_the_op_reads_nothing_it_was_not_given(at, wrong, message):
    inputs = op_inputs("delta", False, grad=False)
    inputs[at] = wrong
    with pytest.raises((ValueError, TypeError), match=message):
        cpu.OPERATOR.forward(inputs[:6], *inputs[6:])


@pytest.mark.parametrize("bounds", [[0, 4, 10], [1, 4, 9], [0, 7, 4, 9]], ids=str)
def test_bounds_outside_the_sequence(bounds):
    inputs = op_inputs("delta", True, grad=False)
    inputs[6], inputs[7] = torch.rand(len(bounds) - 1, 2, 3, 2), torch.tensor(bounds)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 9 or less"):
        cpu.OPERATOR.forward(inputs[:6], *inputs[6:])
