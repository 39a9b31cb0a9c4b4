"""The family's recurrence as PyTorch sees it: what every backend needs for autograd, tracing and eager calls, once.

A backend supplies `forward` and `backward` in terms of numbers:

    forward(q, k, v, a, e, w, W, cu_seqlens, dtype, keep, *settings) -> y, final W, *kept
    backward(dy, dW, q, k, v, a, e, w, *kept, cu_seqlens, *settings) -> [dq, dk, dv, *(those of a, e, w there are), dW]

There are two ways in. Eager calls go straight to these functions through an `autograd.Function`: the Python around a
custom op takes longer than a short sequence. Whatever traces or wraps (torch.compile, export, fake tensors, tensor
subclasses) sees custom ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.common.transforms import refuse_tangent
from fastweights.ops.eager import batch_level, is_eager_gradient, wants_gradients, without_batch

Gradients = tuple[Tensor | None, ...]
# Kernels count the entries of all heads in 32 bits.
_MOST_HEADS = 512


def number_of_chunks(q: Tensor, chunk: int, cu_seqlens: Tensor | None) -> int:
    """Count the chunks to keep a state for; a bound for packed sequences, whose lengths decide the true number."""
    if cu_seqlens is None:
        return q.shape[0] * -(-q.shape[1] // chunk)
    return q.shape[1] // chunk + cu_seqlens.numel() - 1


class Operator:
    """One backend's recurrence: the custom ops `op` and `backward_op`, and `__call__`, which takes the shorter way.

    Args:
        name: of the custom op; its backward pass is called `name`_backward.
        forward, backward: as the module says, annotated as `torch.library.custom_op` wants them.
        fake: what `forward` returns, for fake tensors.
        state_size: D, from q and the settings, where that is not the size of q.
        heads: which axis of each kept tensor counts heads.
        eager: the same pair for eager calls, where they have settings of their own: `forward(inputs, W, cu_seqlens,
            dtype, keep, *settings)`, with W None for zeros, and `backward(dy, dW, inputs, kept, cu_seqlens,
            wants_state, *settings)`.
        for_custom_op: from what eager calls keep, and their settings, to those of the custom op.
        device_types: where `forward` runs, if not everywhere.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        state_size: Callable[..., int] = lambda q, *settings: q.shape[3],
        heads: Sequence[int] = (1,),
        eager: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
        for_custom_op: Callable[..., Any] = lambda kept, settings: (kept, settings),
        device_types: str | None = None,
    ) -> None:
        where: dict[str, Any] = {"mutates_args": (), "device_types": device_types}
        self.op: Any = torch.library.custom_op(f"fastweights::{name}", forward, **where)
        self.op.register_fake(fake)
        self.backward_op: Any = torch.library.custom_op(f"fastweights::{name}_backward", backward, **where)

        @self.backward_op.register_fake
        def _(dy, dW, q, k, v, a, e, w, *rest):  # type: ignore[no-untyped-def]
            cu_seqlens, *settings = rest[len(heads) :]
            state = torch.empty_like(self._zeros((q, k, v), cu_seqlens, settings))
            return [*(x.new_empty(x.shape) for x in (q, k, v, a, e, w) if x is not None), state]

        # dy, dW, q, k, v, a, e, w and what is kept: an axis more is as many heads more.
        self.axes = (2, 1, 2, 2, 2, 2, 2, 2, *heads)
        self.backward_op.register_vmap(lambda info, dims, *args: self._more_heads(info.batch_size, dims, args))
        self.op.register_autograd(self._custom_gradients, setup_context=_remember)
        self.state_size, self.takes_no_state = state_size, eager is not None
        self.forward, backward_eagerly = eager or (
            lambda inputs, *rest: forward(*inputs, *rest),
            lambda dy, dW, inputs, kept, cu, _, *settings: backward(dy, dW, *inputs, *kept, cu, *settings),
        )
        self.apply = self._eager_function(backward_eagerly, for_custom_op)

    def __call__(
        self,
        eager: bool,
        inputs: tuple[Tensor | None, ...],
        W: Tensor | None,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        settings: tuple[Any, ...],
        eager_settings: tuple[Any, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run it on (q, k, v, a, e, w) and W, None for zeros, and return y and the final W."""
        keep = wants_gradients(*inputs, W)
        if W is None and not (eager and self.takes_no_state):
            W = self._zeros(inputs, cu_seqlens, settings)
        if not eager:
            outputs = self.op(*inputs, W, cu_seqlens, dtype, keep, *settings)
        else:
            mine = settings if eager_settings is None else eager_settings
            if keep:
                outputs = self.apply(*inputs, W, cu_seqlens, dtype, *mine)
            else:
                outputs = self.forward(inputs, W, cu_seqlens, dtype, False, *mine)
        return outputs[0], outputs[1]

    def _zeros(self, inputs: tuple[Any, ...], cu_seqlens: Tensor | None, settings: Sequence[Any]) -> Tensor:
        """Return an empty memory."""
        q, v = inputs[0], inputs[2]
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        shape = (N, q.shape[2], self.state_size(q, *settings), v.shape[3])
        return torch.zeros(shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def _custom_gradients(self, ctx: Any, dy: Tensor | None, dW: Tensor | None, *_: Any) -> Gradients:
        _refuse_tangents(dy, dW)
        saved = list(ctx.saved_tensors)
        *tensors, cu_seqlens = saved
        if dy is None:
            dy = saved[2].new_zeros(saved[2].shape, dtype=ctx.dtype)
        grads = self.backward_op(dy, dW, *tensors, cu_seqlens, *ctx.settings)
        return _by_input(grads, tensors, ctx, 3)

    def _more_heads(self, n: int, dims: Sequence[int | None], args: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
        """Run n backward passes as a few: heads have nothing to do with each other, so n calls are n times the heads.

        `dims` say where those of `args` that have it have the axis of the n calls.
        """
        dims = [*dims, *[None] * len(self.axes)]
        tensors, settings = args[: len(self.axes)], args[len(self.axes) :]
        at_once = max(1, _MOST_HEADS // args[2].shape[2])

        def widened(x: Tensor | None, dim: int | None, axis: int, first: int, count: int) -> Tensor | None:
            if x is None:
                return None
            if dim is None:
                x = x.unsqueeze(axis).expand(*x.shape[:axis], count, *x.shape[axis:])
            else:
                x = x.narrow(dim, first, count).movedim(dim, axis)
            return x.flatten(axis, axis + 1)

        parts = []
        for first in range(0, n, at_once):
            count = min(at_once, n - first)
            some = [widened(x, dim, axis, first, count) for x, dim, axis in zip(tensors, dims, self.axes, strict=False)]
            *tokens, dW = self.backward_op(*some, *settings)
            parts.append([*(x.unflatten(2, (count, -1)) for x in tokens), dW.unflatten(1, (count, -1))])
        axes = [*[2] * (len(parts[0]) - 1), 1]
        return [torch.cat(same, axis) for same, axis in zip(zip(*parts, strict=True), axes, strict=True)], axes

    def _eager_function(self, backward: Callable[..., Any], for_custom_op: Callable[..., Any]) -> Callable[..., Any]:
        forward, more_heads, backward_op = self.forward, self._more_heads, self.backward_op

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
                tensors, (W, cu_seqlens, dtype), settings = inputs[:6], inputs[6:9], inputs[9:]
                y, W_end, *kept = forward(tensors, W, cu_seqlens, dtype, True, *settings)
                ctx.save_for_backward(*tensors, W if ctx.needs_input_grad[6] else None, cu_seqlens, *kept)
                ctx.dtype, ctx.settings = dtype, settings
                # Zeros for the gradients of states nobody asked about would be written and read for nothing.
                ctx.set_materialize_grads(False)
                return y, W_end

            @staticmethod
            def backward(ctx: Any, dy: Tensor | None, dW: Tensor | None) -> Gradients:
                saved = ctx.saved_tensors
                tensors, (W, cu_seqlens), kept, settings = saved[:6], saved[6:8], saved[8:], ctx.settings
                if dy is None:
                    dy = tensors[2].new_zeros(tensors[2].shape, dtype=ctx.dtype)
                _refuse_tangents(dy, dW)
                if level := batch_level(dy, dW):
                    kept, settings = for_custom_op(kept, settings)
                    (dy, dim), (dW, dim_of_W) = without_batch(dy, level), without_batch(dW, level)
                    n = len(dW if dim is None else dy)  # type: ignore[arg-type]
                    arguments = (dy, dW, *tensors, *kept, cu_seqlens, *settings)
                    batched, dims = more_heads(n, (dim, dim_of_W), arguments)
                    grads = [torch._add_batch_dim(x, dim, level) for x, dim in zip(batched, dims, strict=True)]
                elif is_eager_gradient(dy, dW):
                    grads = backward(dy, dW, tensors, kept, cu_seqlens, ctx.needs_input_grad[6], *settings)
                else:
                    if W is not None:
                        # So that second derivatives see that the states depend on the initial one.
                        kept = (kept[0] + W.flatten()[:0].sum().to(kept[0].dtype), *kept[1:])
                    kept, settings = for_custom_op(kept, settings)
                    grads = backward_op(dy, dW, *tensors, *kept, cu_seqlens, *settings)
                return _by_input(grads, tensors, ctx, 2)

        # `Function.apply` first looks for torch.func, which `is_eager` has done.
        apply: Callable[..., Any] = super(torch.autograd.Function, Eager).apply
        return apply


class ChunkedOperator(Operator):
    """The operator of a backend that keeps one state before each chunk, whose length `chunk_length(D, M)` says."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        chunk_length: Callable[[int, int], int],
        device_types: str | None = None,
    ) -> None:
        def fake(q, k, v, a, e, w, W, cu_seqlens, dtype, keep, chunk):  # type: ignore[no-untyped-def]
            count = number_of_chunks(q, chunk, cu_seqlens) if keep else 0
            return v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape), W.new_empty((count, *W.shape[1:]))

        super().__init__(name, forward, backward, fake, device_types=device_types)
        self.chunk_length = chunk_length

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor | None,
        e: Tensor | None,
        w: Tensor | None,
        W: Tensor | None,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        eager: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute the recurrence, as `ops.family.Recurrence` has it."""
        chunk = self.chunk_length(k.shape[-1], v.shape[-1])
        return self(eager, (q, k, v, a, e, w), W, cu_seqlens, dtype, (chunk,))


def _refuse_tangents(*grads: Tensor | None) -> None:
    for grad in grads:
        if grad is not None:
            refuse_tangent(grad, "the fast weight memory")


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, cu_seqlens, dtype, _ = inputs[:10]
    ctx.save_for_backward(*tensors, *output[2:], cu_seqlens)
    ctx.dtype, ctx.settings = dtype, inputs[10:]
    ctx.set_materialize_grads(False)


def _by_input(grads: Sequence[Tensor | None], tensors: Sequence[Any], ctx: Any, more: int) -> Gradients:
    """Return a gradient, or None, for each of q, k, v, a, e, w, W, `more` arguments and the settings."""
    left = iter(grads)
    tokens = [None if x is None else next(left) for x in tensors[:6]]
    return *tokens, next(left) if ctx.needs_input_grad[6] else None, *[None] * (more + len(ctx.settings))
