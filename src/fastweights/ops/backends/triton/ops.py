"""The recurrence of the family on the kernels, for autograd; Triton itself is imported when they first run.

There are two ways in. Plain tensors in eager mode go straight to the launch code, through an `autograd.Function`: the
Python around a custom op takes longer than the smaller kernels run. Everything that traces or wraps (torch.compile,
export, fake tensors, tensor subclasses, torch.func) sees two custom ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.ops.backends.triton.configs import (
    Config,
    configuration,
    kept_shapes,
    number_of_groups,
    operand_dtype,
)
from fastweights.ops.family import coefficients
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.problem import Problem


@cache
def _launch() -> ModuleType:
    from fastweights.ops.backends.triton import launch

    return launch


@torch.library.custom_op("fastweights::triton_walk", mutates_args=())
def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    tied: bool,
    keep: bool,
    config: Sequence[int],
    features: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y in `dtype`, the final W, and with `keep` the chunks' states (slots, H, M, D) and inverses (slots, H, C, C).

    Last the groups' transitions (groups, H, D, D). With `tied` the write gate is the erase gate, and w is None. The
    `Features` are those that q and k do not have yet.
    """
    from fastweights.ops.backends.triton import self_check

    # Whatever traced the call could not check the kernels: it had no numbers.
    maps = Features(*features)
    kind = self_check.Kind.of(q, v, (a, e, w), tied, cu_seqlens, Config(*config), maps)
    if reason := self_check.refusal(kind, q.shape[2], q.device):
        raise RuntimeError(f"{reason}; compile again with FASTWEIGHTS_BACKEND=chunked")
    rest = (W, cu_seqlens, dtype, tied, keep, Config(*config), maps)
    *result, transitions = _launch().forward(q, k, v, (a, e, w), *rest)
    return *result, W.new_empty((0, *W.shape[1:3], W.shape[2])) if transitions is None else transitions


@walk.register_fake
def _(q, k, v, a, e, w, W, cu_seqlens, dtype, tied, keep, config, features):  # type: ignore[no-untyped-def]
    config, (_, H, D, M) = Config(*config), W.shape
    kept = operand_dtype(q.dtype, W.dtype, config)
    shapes = kept_shapes((*q.shape[:3], D), M, e is not None, cu_seqlens, keep, config)
    states, inverses = (q.new_empty(shape, dtype=kept) for shape in shapes)
    groups = q.shape[0] * number_of_groups(q.shape[1], cu_seqlens, config)
    transitions = W.new_empty((groups, H, D, D))
    return v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape), states, inverses, transitions


@torch.library.custom_op("fastweights::triton_walk_backward", mutates_args=())
def walk_backward(
    dy: Tensor,
    dW: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    states: Tensor,
    inverses: Tensor,
    transitions: Tensor,
    cu_seqlens: Tensor | None,
    tied: bool,
    wide: torch.dtype,
    config: Sequence[int],
    features: Sequence[int],
) -> list[Tensor]:
    """Gradients of q, k, v, the coefficients that are there, and the initial W, in this order."""
    rest = (states, inverses, transitions, cu_seqlens, tied, wide, Config(*config), Features(*features))
    dq, dk, dv, gates, dW = _launch().backward(dy, dW, q, k, v, (a, e, w), *rest)
    return [dq, dk, dv, *(gate for gate in gates if gate is not None), dW]


@walk_backward.register_fake
def _(dy, dW, q, k, v, a, e, w, states, inverses, transitions, cu_seqlens, tied, wide, config, features):  # type: ignore[no-untyped-def]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    grads = [x.new_empty(x.shape) for x in (q, k, v, a, e, w) if x is not None]
    D = Features(*features).size(q.shape[3])
    return [*grads, q.new_empty((N, q.shape[2], D, v.shape[3]), dtype=wide)]


@cache
def _step() -> Any:
    from fastweights.ops.backends.triton.one_token import step

    return step


@torch.library.custom_op("fastweights::triton_step", mutates_args=())
def step_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor,
    z: Tensor | None,
    dtype: torch.dtype,
    tied: bool,
    features: Sequence[int],
) -> list[Tensor]:
    """y in `dtype`, W and, where it is given, z after one token (B, 1, H, ·); without gradients."""
    from fastweights.ops.backends.triton import self_check

    maps = Features(*features)
    kind = self_check.StepKind.of(q, v, (a, e, w), tied, z is not None, maps)
    if reason := self_check.refusal(kind, q.shape[2], q.device):
        raise RuntimeError(f"{reason}; compile again with FASTWEIGHTS_BACKEND=chunked")
    found = _step()(q, k, v, (a, e, w), W, z, dtype, tied, z is not None, False, maps)
    return [x for x in found if x is not None]


@step_op.register_fake
def _(q, k, v, a, e, w, W, z, dtype, tied, features):  # type: ignore[no-untyped-def]
    there = [v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape)]
    return there if z is None else [*there, z.new_empty(z.shape)]


def takes_step(problem: Problem) -> bool:
    """Whether the problem is one token for each sequence, and nobody wants gradients."""
    if problem.q.shape[1] != 1 or problem.cu_seqlens is not None:
        return False
    tensors = (problem.q, problem.k, problem.v, *problem.gates.values(), problem.W, problem.z)
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


def step(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, W and z after the one token of the problem."""
    a, e, w = coefficients(problem)
    tied = e is not None and e is w
    q, W, z, features = problem.q, problem.W, problem.z, problem.features
    if tied:
        w = None
    if not _plain(q):
        found = step_op(q, problem.k, problem.v, a, e, w, W, z, q.dtype, tied, features)
        return found[0], found[1], None if z is None else found[2]
    rest = (q.dtype, tied, z is not None, problem.in_place, features)
    y, W_end, z_end = _step()(q, problem.k, problem.v, (a, e, w), W, z, *rest)
    if W_end is W:
        # Whoever kept it for a backward pass shall hear of it.
        torch.autograd.graph.increment_version(W)
    return y, W_end, z_end


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, a, e, w, W, cu_seqlens, dtype, tied, _, config, features = inputs
    ctx.save_for_backward(q, k, v, a, e, w, *output[2:], cu_seqlens)
    ctx.dtype, ctx.rest = dtype, (tied, W.dtype, config, features)
    # Zeros for the gradients of states nobody asked about would be written and read for nothing.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dW, *_):  # type: ignore[no-untyped-def]
    q, k, v, *saved, cu_seqlens = ctx.saved_tensors
    a, e, w, *_ = saved
    if dy is None:
        dy = v.new_zeros(v.shape, dtype=ctx.dtype)
    grads = iter(walk_backward(dy, dW, q, k, v, *saved, cu_seqlens, *ctx.rest))
    dq, dk, dv = next(grads), next(grads), next(grads)
    da, de, dw = (None if gate is None else next(grads) for gate in (a, e, w))
    return dq, dk, dv, da, de, dw, next(grads), None, None, None, None, None, None


walk.register_autograd(_backward, setup_context=_setup_context)


class _Walk(torch.autograd.Function):
    """The same, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, a, e, w, W, cu_seqlens, dtype, tied, config, features = inputs
        rest = (W, cu_seqlens, dtype, tied, True, config, features)
        y, W_end, *kept = _launch().forward(q, k, v, (a, e, w), *rest)
        ctx.save_for_backward(q, k, v, a, e, w, *kept, cu_seqlens)
        ctx.dtype, ctx.rest = dtype, (tied, W.dtype, config, features)
        ctx.set_materialize_grads(False)
        return y, W_end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dW: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, a, e, w, *kept, cu_seqlens = ctx.saved_tensors
        if dy is None:
            dy = v.new_zeros(v.shape, dtype=ctx.dtype)
        dq, dk, dv, gates, dW = _launch().backward(dy, dW, q, k, v, (a, e, w), *kept, cu_seqlens, *ctx.rest)
        return dq, dk, dv, *gates, dW, None, None, None, None, None


def _plain(q: Tensor) -> bool:
    """Whether nothing but autograd looks on."""
    return type(q) is Tensor and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    features: Features = PLAIN,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """The walk as `ops.family.Recurrence` has it; with `features`, from raw keys, queries and gates."""
    # The delta rule erases and writes with one gate: one to read, and one gradient instead of two and their sum.
    tied = e is not None and e is w
    inputs = (q, k, v, a, e, None if tied else w, W)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    N, H, D, M = W.shape
    config = config or configuration(D, M, q.dtype, N * H, q.shape[1], features)
    if not _plain(q):
        y, W, *_ = walk(*inputs, cu_seqlens, dtype, tied, keep, config, features)
    elif keep:
        y, W = _Walk.apply(*inputs, cu_seqlens, dtype, tied, config, features)
    else:
        a, e, w = inputs[3:6]
        y, W, *_ = _launch().forward(q, k, v, (a, e, w), W, cu_seqlens, dtype, tied, False, config, features)
    return y, W
