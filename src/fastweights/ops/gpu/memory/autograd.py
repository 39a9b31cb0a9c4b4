"""The recurrence of the family on the kernels, for autograd; Triton itself is imported when they first run.

There are two ways in. Plain tensors in eager mode go straight to the launch code, through an `autograd.Function`: the
Python around a custom op takes longer than the smaller kernels run. Everything that traces or wraps (torch.compile,
export, fake tensors, tensor subclasses, torch.func) sees custom ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.autograd import Gradients, differentiable, like_inputs, plain, plain_gradient, wants_gradients
from fastweights.ops.backend import Again
from fastweights.ops.family import coefficients, coefficients_of
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.gpu.memory.variants import (
    Variant,
    candidates,
    from_integers,
    group_length,
    holds_features,
    kept_shapes,
    may_go_by_token,
    number_of_groups,
    operand_dtype,
    to_integers,
)
from fastweights.ops.problem import Problem

Gates = tuple[Tensor | None, Tensor | None, Tensor | None]


@cache
def _walks() -> ModuleType:
    from fastweights.ops.gpu.memory import grouped as walks

    return walks


@cache
def _plan() -> Any:
    from fastweights.ops.gpu.memory.plan import plan

    return plan


@cache
def _one_token() -> Any:
    from fastweights.ops.gpu.memory.kernels.one_token import step

    return step


def _prove(kind: Any, q: Tensor) -> None:
    """Whatever traced the call could not check the kernels: it had no numbers."""
    from fastweights.ops.gpu.memory import self_check

    if reason := self_check.refusal(kind, q.shape[2], q.device):
        raise RuntimeError(f"{reason}; compile again with FASTWEIGHTS_BACKEND=chunked")


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
    keep: bool,
    wide: torch.dtype,
    tied: bool,
    config: Sequence[int],
    features: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y in `dtype`, the final W, and with `keep` the chunks' states (slots, H, M, D) and inverses (slots, H, C, C).

    Then, of a rule that erases, the tokens' errors (B, T, H, M); last the groups' transitions (groups, H, D, D). With
    `tied` the write gate is the erase gate, and w is None. The `Features` are those that q and k do not have yet.
    """
    from fastweights.ops.gpu.memory.kinds import Kind

    row, maps = from_integers(config), Features(*features)
    _prove(Kind.of(q, v, (a, e, w), tied, cu_seqlens, row, maps), q)
    rest = (W, cu_seqlens, dtype, wide, tied, keep, row, maps)
    *result, transitions = _walks().forward(q, k, v, (a, e, w), *rest)
    return *result, W.new_empty((0, *W.shape[1:3], W.shape[2])) if transitions is None else transitions


@walk.register_fake
def _(q, k, v, a, e, w, W, cu_seqlens, dtype, keep, wide, tied, config, features):  # type: ignore[no-untyped-def]
    config, (_, H, D, M) = from_integers(config), W.shape
    kept = operand_dtype(q.dtype, wide, config)
    shapes = kept_shapes((*q.shape[:3], D), M, e is not None, cu_seqlens, keep, config)
    states = q.new_empty(shapes[0], dtype=kept)
    inverses, errors = (q.new_empty(shape, dtype=kept) for shape in shapes[1:])
    groups = q.shape[0] * number_of_groups(q.shape[1], cu_seqlens, config)
    transitions = W.new_empty((groups, H, D, D))
    return v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape), states, inverses, errors, transitions


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
    errors: Tensor,
    transitions: Tensor,
    cu_seqlens: Tensor | None,
    wide: torch.dtype,
    tied: bool,
    config: Sequence[int],
    features: Sequence[int],
) -> list[Tensor]:
    """Gradients of q, k, v, the coefficients that are there, and the initial W, in this order."""
    rest = (
        states,
        inverses,
        errors,
        transitions,
        cu_seqlens,
        wide,
        tied,
        True,
        from_integers(config),
        Features(*features),
    )
    dq, dk, dv, gates, dW = _walks().backward(dy, dW, q, k, v, (a, e, w), *rest)
    return [dq, dk, dv, *(gate for gate in gates if gate is not None), dW]


@walk_backward.register_fake
def _(dy, dW, q, k, v, a, e, w, states, inverses, errors, transitions, cu_seqlens, wide, tied, config, features):  # type: ignore[no-untyped-def]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    D = Features(*features).size(q.shape[3])
    return [*like_inputs(q, k, v, a, e, w), q.new_empty((N, q.shape[2], D, v.shape[3]), dtype=wide)]


differentiable(walk, walk_backward)


class _Walk(torch.autograd.Function):
    """The same, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, a, e, w, W, cu_seqlens, (plan, rest) = inputs
        if plan is None:
            dtype, wide, tied, config, features = rest
            arguments = (cu_seqlens, dtype, wide, tied, True, config, features)
            y, W_end, *kept = _walks().forward(q, k, v, (a, e, w), W, *arguments)
        else:
            y, W_end, *kept = plan.forward((q, k, v, a, e, w), W, cu_seqlens, True)
        ctx.save_for_backward(q, k, v, a, e, w, W if ctx.needs_input_grad[6] else None, cu_seqlens, *kept)
        ctx.how = plan, rest
        ctx.set_materialize_grads(False)
        return y, W_end

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dW: Tensor | None) -> Gradients:
        q, k, v, a, e, w, W, cu_seqlens, *kept = ctx.saved_tensors
        plan, (dtype, wide, tied, config, features) = ctx.how
        if dy is None:
            dy = v.new_zeros(v.shape, dtype=dtype)
        wants_state = ctx.needs_input_grad[6]
        if not plain_gradient(dy, dW):
            if W is not None:
                # So that second derivatives see that states depend on the initial one.
                kept[0] = kept[0] + W.flatten()[:0].sum().to(kept[0].dtype)
            if plan is not None or kept[3] is None:
                kept[3:] = [q.new_empty(0)]
            settings = (cu_seqlens, wide, tied, to_integers(config), list(features))
            grads = iter(walk_backward(dy, dW, q, k, v, a, e, w, *kept, *settings))
            found = [None if x is None else next(grads) for x in (q, k, v, a, e, w)]
            return *found, next(grads) if wants_state else None, None, None
        if plan is None:
            rest = (*kept, cu_seqlens, wide, tied, wants_state, config, features)
            dq, dk, dv, gates, dW = _walks().backward(dy, dW, q, k, v, (a, e, w), *rest)
        else:
            inputs = (q, k, v, a, e, w)
            dq, dk, dv, gates, dW = plan.backward(inputs, dy, dW, *kept, cu_seqlens, wants_state)
        return dq, dk, dv, *gates, dW, None, None


# `Function.apply` first looks for torch.func, which `plain` has done.
_apply = super(torch.autograd.Function, _Walk).apply


def _variant(
    q: Tensor, v: Tensor, gates: Gates, tied: bool, N: int, cu_seqlens: Tensor | None, features: Features
) -> Variant:
    """The first candidate whose kernels are right; while something traces, there are no numbers to find out with."""
    (_, T, H, R), M = q.shape, v.shape[3]
    D = features.size(R)
    variants = candidates(D, M, q.dtype, N * H, T, features, may_go_by_token(gates[0] is not None, H, D, M))
    if len(variants) == 1 or not plain(q, v, *gates):
        return variants[0]
    from fastweights.ops.gpu.memory import self_check
    from fastweights.ops.gpu.memory.kinds import Kind

    kinds = [Kind.of(q, v, gates, tied, cu_seqlens, variant, features) for variant in variants]
    return self_check.first_right(kinds, H, q.device).config


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    features: Features = PLAIN,
    config: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """The walk as `ops.family.Recurrence` has it; with `features`, from raw keys, queries and gates.

    W may be None for zeros, but not where something traces.
    """
    # The delta rule erases and writes with one gate: one to read, and one gradient instead of two and their sum.
    tied = e is not None and e is w
    w = None if tied else w
    inputs = (q, k, v, a, e, w, W)
    keep = wants_gradients(*inputs)
    N, wide = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, torch.promote_types(q.dtype, torch.float32)
    if config is None:
        config = _variant(q, v, (a, e, w), tied, N, cu_seqlens, features)
    if not plain(*inputs, cu_seqlens):
        y, W, *_ = walk(*inputs, cu_seqlens, dtype, keep, wide, tied, to_integers(config), list(features))
        return y, W
    how = (dtype, wide, tied, config, features)
    plan = None
    if group_length(q.shape[1], cu_seqlens, config) == 0:
        plan = _plan()(q, k, v, (a, e, w), N, cu_seqlens, *how)
        plan.compile_ahead(keep)
    if keep:
        y, W = _apply(*inputs, cu_seqlens, (plan, how))
    elif plan is not None:
        y, W, *_ = plan.forward((q, k, v, a, e, w), W, cu_seqlens, False)
    else:
        y, W, *_ = _walks().forward(q, k, v, (a, e, w), W, cu_seqlens, dtype, wide, tied, False, config, features)
    assert W is not None
    return y, W


def again(problem: Problem) -> Again | None:
    """The walk for problems like this one, or the step where each has one token; not over groups."""
    if problem.z is not None or problem.cu_seqlens is not None or problem.mask is not None:
        return None
    (N, _, D, M), (_, T, _, _), wide = problem.W.shape, problem.q.shape, problem.W.dtype
    features, dtype, one = problem.features, problem.q.dtype, T == 1
    if features.map and not holds_features(D, M):
        # One token is taken with any D; there is no walk to be ready with.
        return None
    a, e, w = coefficients(problem)
    tied = e is not None and e is w
    config = _variant(problem.q, problem.v, (a, e, None if tied else w), tied, N, None, features)
    if group_length(T, None, config):
        return None
    how = (dtype, wide, tied, config, features)
    plan = _plan()(problem.q, problem.k, problem.v, (a, e, None if tied else w), N, None, *how)
    # The delta rule's one coefficient is its one gate. Nothing below may hold on to a tensor of this problem.
    direct = tied and a is None and e is problem.gates.get("beta")
    rule, logits = problem.rule, bool(features.logits)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        decay: Tensor | None,
        W: Tensor | None,
        in_place: bool,
    ) -> tuple[Tensor, Tensor]:
        if direct:
            a, e, w = None, beta, None
        else:
            gates = {name: gate for name, gate in (("beta", beta), ("decay", decay)) if gate is not None}
            a, e, w = coefficients_of(rule, gates, logits, wide)
            w = None if tied else w
        if wants_gradients(q, k, v, a, e, w, W):
            y, W_end = _apply(q, k, v, a, e, w, W, None, (plan, how))
        elif one:
            y, W_end, _ = _one_token()(q, k, v, (a, e, w), W, None, dtype, tied, False, in_place, features)
            if W_end is W:
                torch.autograd.graph.increment_version(W)
        else:
            y, W_end, *_ = plan.forward((q, k, v, a, e, w), W, None, False)
        return y, W_end

    return run


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
    from fastweights.ops.gpu.memory.kinds import StepKind

    maps = Features(*features)
    _prove(StepKind.of(q, v, (a, e, w), tied, z is not None, maps), q)
    found = _one_token()(q, k, v, (a, e, w), W, z, dtype, tied, z is not None, False, maps)
    return [x for x in found if x is not None]


@step_op.register_fake
def _(q, k, v, a, e, w, W, z, dtype, tied, features):  # type: ignore[no-untyped-def]
    there = [v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape)]
    return there if z is None else [*there, z.new_empty(z.shape)]


def takes_step(problem: Problem) -> bool:
    """Whether the problem is one token for each sequence, and nobody wants gradients."""
    if problem.q.shape[1] != 1 or problem.cu_seqlens is not None:
        return False
    return not wants_gradients(problem.q, problem.k, problem.v, *problem.gates.values(), problem.W, problem.z)


def step(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, W and z after the one token of the problem."""
    a, e, w = coefficients(problem)
    tied = e is not None and e is w
    q, W, z, features = problem.q, problem.W, problem.z, problem.features
    if tied:
        w = None
    if not plain(q, problem.k, problem.v, a, e, w, W, z):
        found = step_op(q, problem.k, problem.v, a, e, w, W, z, q.dtype, tied, list(features))
        return found[0], found[1], None if z is None else found[2]
    rest = (q.dtype, tied, z is not None, problem.in_place, features)
    y, W_end, z_end = _one_token()(q, problem.k, problem.v, (a, e, w), W, z, *rest)
    if W_end is W:
        # Whoever kept it for a backward pass shall hear of it.
        torch.autograd.graph.increment_version(W)
    return y, W_end, z_end
