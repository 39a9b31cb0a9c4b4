"""The recurrence of the family as custom ops; Triton itself is imported when one of them first runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.ops.backends.triton.configs import PRECISIONS, Config, configuration, kept_shapes


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y in `dtype`, the final W, and with `keep` the chunks' states (slots, H, M, D) and inverses (slots, H, C, C).

    With `tied` the write gate is the erase gate, and w is None.
    """
    from fastweights.ops.backends.triton import launch

    return launch.forward(q, k, v, (a, e, w), W, cu_seqlens, dtype, tied, keep, Config(*config))


@walk.register_fake
def _(q, k, v, a, e, w, W, cu_seqlens, dtype, tied, keep, config):  # type: ignore[no-untyped-def]
    config = Config(*config)
    kept = q.dtype if PRECISIONS[config.precision] == "16-bit" else W.dtype
    states, inverses = (q.new_empty(shape, dtype=kept) for shape in kept_shapes(q, v, e, cu_seqlens, keep, config))
    return v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape), states, inverses


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
    cu_seqlens: Tensor | None,
    tied: bool,
    wide: torch.dtype,
    config: Sequence[int],
) -> list[Tensor]:
    """Gradients of q, k, v, the coefficients that are there, and the initial W, in this order."""
    from fastweights.ops.backends.triton import launch

    arguments = dy, dW, q, k, v, (a, e, w), states, inverses, cu_seqlens, tied, wide, Config(*config)
    dq, dk, dv, gates, dW = launch.backward(*arguments)
    return [dq, dk, dv, *(gate for gate in gates if gate is not None), dW]


@walk_backward.register_fake
def _(dy, dW, q, k, v, a, e, w, states, inverses, cu_seqlens, tied, wide, config):  # type: ignore[no-untyped-def]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    grads = [x.new_empty(x.shape) for x in (q, k, v, a, e, w) if x is not None]
    return [*grads, q.new_empty((N, q.shape[2], q.shape[3], v.shape[3]), dtype=wide)]


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, a, e, w, W, cu_seqlens, dtype, tied, _, config = inputs
    ctx.save_for_backward(q, k, v, a, e, w, *output[2:], cu_seqlens)
    ctx.tied, ctx.config, ctx.dtype, ctx.wide = tied, config, dtype, W.dtype
    # Zeros for the gradients of states nobody asked about would be written and read for nothing.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dW, *_):  # type: ignore[no-untyped-def]
    q, k, v, a, e, w, states, inverses, cu_seqlens = ctx.saved_tensors
    if dy is None:
        dy = v.new_zeros(v.shape, dtype=ctx.dtype)
    grads = iter(walk_backward(dy, dW, q, k, v, a, e, w, states, inverses, cu_seqlens, ctx.tied, ctx.wide, ctx.config))
    dq, dk, dv = next(grads), next(grads), next(grads)
    da, de, dw = (None if gate is None else next(grads) for gate in (a, e, w))
    return dq, dk, dv, da, de, dw, next(grads), None, None, None, None, None


walk.register_autograd(_backward, setup_context=_setup_context)


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
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """The walk as `ops.family.Recurrence` has it."""
    # The delta rule erases and writes with one gate: one to read, and one gradient instead of two and their sum.
    tied = e is not None and e is w
    inputs = (q, k, v, a, e, None if tied else w, W)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    config = config or configuration(q.shape[3], v.shape[3], q.dtype)
    y, W, *_ = walk(*inputs, cu_seqlens, dtype, tied, keep, config)
    return y, W
