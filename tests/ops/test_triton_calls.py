"""The Triton kernels as callers meet them, in the interpreter: strides, custom ops, refusals, torch.compile, NaN.

`test_in_the_interpreter` runs them.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastweights as fw
from fastweights.ops import chunked
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.gpu.memory import BACKEND, self_check
from fastweights.ops.gpu.memory import variants as configs
from fastweights.ops.gpu.memory.autograd import OPERATOR
from fastweights.ops.gpu.memory.signatures import WalkSignature
from fastweights.ops.gpu.memory.variants import configuration, group_length, to_integers
from fastweights.ops.memory import fast_weight_memory
from tests.ops.calls import random_call, refusal, relative_error
from tests.ops.interpreted import INTERPRETED, altered, as_fused, inside, poisoned, recurrence  # noqa: F401
from tests.ops.test_triton_interpret import FUSED, SPLIT, TOKENS, a_problem

pytest.importorskip("triton")


@inside
def test_strides():
    """Slices of one projection, and a gradient that is one number expanded."""
    whole = torch.randn(2, 20, 2, 3, 16, dtype=torch.float64)
    beta = torch.rand(2, 2, 20, dtype=torch.float64).transpose(1, 2)
    W = torch.randn(2, 2, 16, 16, dtype=torch.float64).transpose(2, 3)
    whole.requires_grad_()
    grads = []
    for run in (recurrence, chunked.recurrence):
        q, k, v = whole.unbind(3)
        y, W_end = run(q, k, v, None, beta, beta, W, None, q.dtype)
        grads.append(torch.autograd.grad(y.sum() + W_end.sum(), whole)[0])
        assert y.is_contiguous()
    torch.testing.assert_close(*grads)


@inside
def test_no_second_backward():
    """By no input, the state among them, whatever asks."""
    q, k, v = (torch.randn(1, 5, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    W = torch.randn(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    y, _ = recurrence(q, k, v, None, None, None, W, None, q.dtype)
    (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    for x in (q, k, v, W):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(dq.sum() + x.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (dq.sum() + q.sum()).backward()


@inside
@pytest.mark.parametrize("kernels", [FUSED, SPLIT, TOKENS], ids=["fused", "split", "tokens"])
def test_as_a_custom_op(kernels):
    """Schema, fake tensors and autograd registration."""
    q, k, v, W = (torch.randn(shape, dtype=torch.float64) for shape in [(1, 5, 1, 8)] * 3 + [(1, 1, 8, 8)])
    beta = torch.rand(1, 5, 1, dtype=torch.float64)
    for x in (q, k, v, W):
        x.requires_grad_()
    torch.use_deterministic_algorithms(False)
    settings = (True, to_integers(kernels), *PLAIN[:4])
    arguments = (q, k, v, None, beta, None, W, None, torch.float64, True, *settings)
    torch.library.opcheck(OPERATOR.op, arguments)


@inside
def test_as_a_custom_op_in_groups(monkeypatch):
    monkeypatch.setattr(configs, "LEAST_CHUNKS", 1)
    monkeypatch.setattr(configs, "LEAST_GROUPS", 2)
    q, v, W = (torch.randn(shape, dtype=torch.float64) for shape in [(1, 20, 1, 8), (1, 20, 1, 8), (1, 1, 8, 8)])
    torch.use_deterministic_algorithms(False)
    settings = (False, to_integers(replace(SPLIT, groups=2)), *PLAIN[:4])
    arguments = (q, q, v, None, None, None, W, None, torch.float64, True, *settings)
    torch.library.opcheck(OPERATOR.op, arguments, test_utils=("test_faketensor", "test_schema"))
    q, W, beta = torch.cat([q, q]), torch.cat([W, W]), torch.rand(2, 20, 1, dtype=torch.float64)
    for keep in (True, False):
        arguments = (q, q, q, None, beta, beta, W, None, torch.float64, keep, *settings)
        torch.library.opcheck(OPERATOR.op, arguments, test_utils=("test_faketensor", "test_schema"))


@inside
@pytest.mark.parametrize("gradients", [False, True])
def test_few_functions_stand_between_a_layer_and_its_kernel(monkeypatch, gradients):
    """How many of this package are on the stack at a launch, with the layer's own and the launch."""
    from fastweights.ops.gpu.launcher import Launch

    launch, package, passed = Launch.__call__, str(Path(fw.__file__).parent), []

    def count(*arguments):
        frames = [sys._getframe()]
        while (caller := frames[-1].f_back) is not None:
            frames.append(caller)
        ours = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.startswith(package)]
        passed.append(1 + len(ours))
        assert ours[-1] == "forward", ours
        return launch(*arguments)

    monkeypatch.setattr(Launch, "__call__", count)
    layer = fw.FastWeightAttention(16, 1, backend="triton")
    with torch.set_grad_enabled(gradients):
        for most in (10, 6):
            layer(torch.randn(1, 4, 16))
            assert passed and max(passed) <= most
            passed.clear()


@inside
def test_what_it_refuses():
    assert BACKEND.unavailable() is None
    assert refusal(BACKEND, a_problem("delta")) is None
    assert "bfloat16" in refusal(BACKEND, a_problem("delta", dtype=torch.bfloat16))
    assert "D = 520" in refusal(BACKEND, a_problem("delta", T=1, D=520))
    assert "outside the family" in refusal(BACKEND, a_problem("fwp1991"))


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu():
    assert BACKEND.unavailable() == "there is no CUDA device"
    assert "tensors are on cpu" in refusal(BACKEND, a_problem("delta"))


@inside
def test_compiles_without_graph_breaks():
    """Tracing takes the custom op, eager mode does not; both give the same."""
    problem = a_problem("gated_delta", T=20, D=8, M=8)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v, *problem.gates.values())]
    torch.use_deterministic_algorithms(False)

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return fast_weight_memory(q, k, v, rule="gated_delta", beta=beta, decay=decay)[0]

    outputs = [run(*leaves) for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager"))]
    torch.testing.assert_close(*outputs)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in outputs), strict=True):
        torch.testing.assert_close(ours, theirs)


@inside
@pytest.mark.parametrize("T", [1, 5])
def test_heads_before_tokens(T):
    """Of one token torch lets the stride be anything: kernels must step from batch to batch by another."""
    B, H, D = 3, 2, 8
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(3))
    beta = torch.rand(B, H, T, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weights = torch.randn(B, H, T, D, dtype=torch.float64)

    def everything(backend):
        y, state = fast_weight_memory(q, k, v, beta=beta, backend=backend)
        loss = (y.transpose(1, 2) * weights).sum() + state.W.square().sum()
        return [y, state.W, *torch.autograd.grad(loss, (q, k, v, beta))]

    for ours, want in zip(everything("triton"), everything("reference"), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-10)


@inside
def test_bounds_that_are_no_block_of_memory():
    bounds = torch.tensor([[0, 7], [5, 7], [20, 7]], dtype=torch.int32)[:, 0]
    q, k, v = torch.randn(3, 1, 20, 1, 8, dtype=torch.float64)
    ours, want = (
        fast_weight_memory(q, k, v, rule="sum", cu_seqlens=bounds, backend=b) for b in ("triton", "reference")
    )
    torch.testing.assert_close(ours[0], want[0])
    torch.testing.assert_close(ours[1].W, want[1].W)


@inside
def test_checked_for_the_first_time_in_inference_mode():
    kind = WalkSignature(
        torch.float32, 8, 8, False, True, False, True, True, configuration(8, 8, torch.float32, 99, 99)
    )
    check = self_check.check_of(kind, 1)
    with torch.inference_mode():
        verdict = check.run(torch.device("cpu"))
    assert verdict.errors and check.reason(verdict) is None, verdict


def test_groups_only_where_a_sequence_is_cut_into_them():
    rows = [
        (walks, T, configuration(64, 64, torch.bfloat16, walks, T)) for walks in (1, 29, 32) for T in (2048, 2100, 9000)
    ]
    for walks, T, row in rows:
        assert (row.groups > 0) is (group_length(T, None, row) > 0), (walks, T)
    assert any(row.groups for *_, row in rows) and not all(row.groups for *_, row in rows)


@inside
@pytest.mark.parametrize("T", [1, 20])
def test_keys_that_come_mapped_and_are_still_to_be_divided_by_their_sum(T):
    q, k, v = torch.rand(3, 1, T, 2, 8, dtype=torch.float64)
    features = Features.named("none", sum=True)
    ours, want = (
        fast_weight_memory(q, k, v, rule="sum", features=features, backend=b) for b in ("triton", "reference")
    )
    torch.testing.assert_close(ours[0], want[0])


@inside
@pytest.mark.parametrize("normalization", [None, "attention"])
def test_decays_per_key_of_keys_of_one_entry(normalization):
    call = random_call("gated_delta log per key", normalization, 1, 5, 2, 1, 3)
    assert relative_error(call.run("triton"), call.run("reference")) < 1e-12


@inside
@pytest.mark.parametrize("normalization", [None, "attention"])
@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
def test_what_is_not_finite_stays_in_its_row_head_text_and_mask(rule, normalization):
    """In the very chunk of the token, and in later ones: other rows, other heads, texts that start after it."""
    T, token = 40, 9
    call = random_call(rule, normalization, 2, T, 2, 8, 8)
    starts, mask = torch.zeros(2, T, dtype=torch.bool), torch.ones(2, T, dtype=torch.bool)
    starts[0, 12], mask[1, 20] = True, False
    clean = call.run("triton", starts=starts, mask=mask)
    for tensor in (call.q, call.k, call.v, *call.gates.values()):
        tensor[1, 20] = float("nan")
        tensor[0, token, 1] = float("nan")
    found = call.run("triton", starts=starts, mask=mask)
    y, want = found[0], clean[0]
    assert y[0, token, 1].isnan().all()
    assert torch.equal(y[1], want[1])
    assert torch.equal(y[0, :, 0], want[0, :, 0])
    assert torch.equal(y[0, 12:], want[0, 12:])
    for ours, theirs in zip(found[1:], clean[1:], strict=True):
        assert torch.equal(ours, theirs)


@inside
@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
def test_batched_gradients(rule):
    call = random_call(rule, None, 1, 18, 2, 8, 8).requiring_grad()
    outputs = call.run("triton")
    cotangents = [torch.randn(2, *y.shape, dtype=torch.float64) for y in outputs]
    batched = torch.autograd.grad(outputs, call.inputs(), cotangents, retain_graph=True, is_grads_batched=True)
    for i in range(2):
        single = torch.autograd.grad(outputs, call.inputs(), [c[i] for c in cotangents], retain_graph=True)
        torch.testing.assert_close([x[i] for x in batched], list(single))
