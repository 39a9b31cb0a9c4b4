"""The family's recurrence as PyTorch sees it: what every backend needs for autograd, tracing and eager calls, once.

A backend supplies `forward` and `backward` in terms of numbers, where `tokens` are q, k, v, a, e and w:

    forward(tokens, W, cu_seqlens, dtype, keep, *settings) -> y, final W, *kept
    backward(dy, dW, tokens, kept, cu_seqlens, *settings) -> [dq, dk, dv, *(those of a, e, w there are), dW]

There are two ways in. Eager calls go straight to these functions, or to kernels, through an `autograd.Function`: the
Python around a custom op takes longer than a short sequence. Whatever traces or wraps (torch.compile, export, fake
tensors, tensor subclasses) sees custom ops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fastweights.common.transforms import refuse_tangent
from fastweights.ops import causality
from fastweights.ops.causality import Tokens
from fastweights.ops.eager import batch_level, is_eager_gradient, wants_gradients, without_batch
from fastweights.ops.family import LOG_OF_ZERO

# Of q, k, v, a, e, w and W; None for those that are None, or need no gradient.
Gradients = tuple[Tensor | None, ...]
# What the forward pass keeps for the backward pass.
Kept = Sequence[Tensor]
# Kernels count the entries of all heads in 32 bits.
_MOST_HEADS = 512


def number_of_chunks(q: Tensor, chunk: int, cu_seqlens: Tensor | None) -> int:
    """Count the chunks to keep a state for; a bound for packed sequences, whose lengths decide the true number."""
    if cu_seqlens is None:
        return q.shape[0] * -(-q.shape[1] // chunk)
    return q.shape[1] // chunk + cu_seqlens.numel() - 1


class Passes(Protocol):
    """How eager calls of one spec are run; `tokens` are q, k, v, a, e and w."""

    def forward(self, tokens: Tokens, W: Tensor | None, cu_seqlens: Tensor | None, keep: bool) -> Sequence[Any]:
        """Return y, the final W and, with `keep`, what the backward pass needs; W may be None for zeros."""
        ...

    def backward(
        self, tokens: Tokens, dy: Tensor, dW_end: Tensor | None, kept: Kept, cu_seqlens: Tensor | None, wants_dW: bool
    ) -> Gradients:
        """Return the gradients, that of W only if it is wanted."""
        ...


TOKENS = "Tensor q, Tensor k, Tensor v, Tensor? a, Tensor? e, Tensor? w"


class Operator:
    """One backend's recurrence: the custom ops `op` and `backward_op`, and `bind`, which gives the shorter way.

    Args:
        name: of the custom op; its backward pass is called `name`_backward.
        forward, backward: as the module says.
        settings: their types and names, as in the schema of an operator.
        kept: names of what `forward` keeps, and which axis of each counts heads.
        empty: `empty(tokens, W, cu_seqlens, keep, *settings)`, tensors like those that are kept.
        state_size: D, from q and the settings, where that is not the size of q.
        plan: `plan(tokens, cu_seqlens, dtype, keep, *settings)` for eager calls, where these functions are not that.
        device_types: where `forward` runs, if not everywhere.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        settings: str,
        kept: Mapping[str, int],
        empty: Callable[..., Sequence[Tensor]],
        *,
        state_size: Callable[..., int] = lambda q, *settings: q.shape[3],
        plan: Callable[..., Passes] | None = None,
        device_types: str | None = None,
    ) -> None:
        self.forward, self.backward = forward, backward
        last = 6 + len(kept)

        def define(name: str, function: Callable[..., Any], schema: str) -> Any:
            how: dict[str, Any] = {"mutates_args": (), "device_types": device_types, "schema": schema}
            return torch.library.custom_op(f"fastweights::{name}", function, **how)

        self.op = define(
            name,
            lambda *args: tuple(forward(args[:6], *args[6:])),
            f"({TOKENS}, Tensor W, Tensor? cu_seqlens, ScalarType dtype, bool keep, {settings}) -> "
            f"({', '.join(['Tensor'] * (2 + len(kept)))})",
        )
        self.backward_op = define(
            f"{name}_backward",
            lambda dy, dW, *args: backward(dy, dW, args[:6], args[6:last], *args[last:]),
            f"(Tensor dy, Tensor? dW, {TOKENS}, {', '.join(f'Tensor {name}' for name in kept)}, Tensor? cu_seqlens, "
            f"{settings}) -> Tensor[]",
        )

        @self.op.register_fake
        def _(q, k, v, a, e, w, W, cu_seqlens, dtype, keep, *settings):  # type: ignore[no-untyped-def]
            like = empty((q, k, v, a, e, w), W, cu_seqlens, keep, *settings)
            return v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape), *like

        @self.backward_op.register_fake
        def _(dy, dW, *args):  # type: ignore[no-untyped-def]
            tokens, cu_seqlens, settings = args[:6], args[last], args[last + 1 :]
            state = torch.empty_like(self.zeros(tokens, cu_seqlens, settings))
            return [*(x.new_empty(x.shape) for x in tokens if x is not None), state]

        # dy, dW, q, k, v, a, e, w and what is kept: an axis more is as many heads more.
        self.axes = (2, 1, 2, 2, 2, 2, 2, 2, *kept.values())
        self.backward_op.register_vmap(lambda info, dims, *args: self.more_heads(info.batch_size, dims, args))
        self.op.register_autograd(self._custom_gradients, setup_context=_remember)
        self.state_size = state_size
        self.plan = plan

    def bind(self, settings: tuple[Any, ...], eager: bool, gradients: bool, tied: bool = False) -> Callable[..., Any]:
        """Return a recurrence, as `ops.family.Recurrence` has it, with these settings.

        Args:
            eager: whether only autograd watches the call.
            gradients: whether a backward pass may come.
            tied: whether the write gate is the erase gate. One is then read, with one gradient.
        """
        bound = Bound(self, settings, eager, tied)
        return partial(_apply, bound) if eager and gradients else bound

    def zeros(self, tokens: Sequence[Any], cu_seqlens: Tensor | None, settings: Sequence[Any]) -> Tensor:
        """Return an empty memory."""
        q, v = tokens[0], tokens[2]
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        shape = (N, v.shape[2], self.state_size(q, *settings), v.shape[3])
        return torch.zeros(shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def _custom_gradients(self, ctx: Any, dy: Tensor | None, dW: Tensor | None, *_: Any) -> Gradients:
        _refuse_tangents(dy, dW)
        *tensors, cu_seqlens = ctx.saved_tensors
        if dy is None:
            dy = tensors[2].new_zeros(tensors[2].shape, dtype=ctx.dtype)
        grads = self.backward_op(dy, dW, *tensors, cu_seqlens, *ctx.settings)
        return *_by_input(grads, tensors, ctx.needs_input_grad[6]), *[None] * (3 + len(ctx.settings))

    def more_heads(self, n: int, dims: Sequence[int | None], args: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
        """Run n backward passes as a few: heads have nothing to do with each other, so n calls are n times the heads.

        `dims` say where those of `args` that have it have the axis of the n calls.
        """
        dims = [*dims, *[None] * len(self.axes)]
        tensors, settings = args[: len(self.axes)], args[len(self.axes) :]
        at_once = max(1, _MOST_HEADS // args[4].shape[2])

        def widened(x: Tensor | None, dim: int | None, axis: int, first: int, count: int) -> Tensor | None:
            if x is None:
                return None
            if dim is None:
                x = x.unsqueeze(axis).expand(*x.shape[:axis], count, *x.shape[axis:])
            else:
                x = x.narrow(dim, first, count).movedim(dim, axis)
            # Of one head, that may be a view of the same numbers n times. What is kept is read as a block of memory.
            return x.flatten(axis, axis + 1).contiguous()

        parts = []
        for first in range(0, n, at_once):
            count = min(at_once, n - first)
            some = [widened(x, dim, axis, first, count) for x, dim, axis in zip(tensors, dims, self.axes, strict=False)]
            *tokens, dW = self.backward_op(*some, *settings)
            parts.append([*(x.unflatten(2, (count, -1)) for x in tokens), dW.unflatten(1, (count, -1))])
        axes = [*[2] * (len(parts[0]) - 1), 1]
        return [torch.cat(same, axis) for same, axis in zip(zip(*parts, strict=True), axes, strict=True)], axes


@dataclass(eq=False, slots=True)
class Bound:
    """An operator with settings, as `ops.family.Recurrence` has it; eager calls share a plan, made at the first.

    For an operator without plans this is the plan itself.
    """

    operator: Operator
    settings: tuple[Any, ...]
    eager: bool
    tied: bool
    plan: Passes | None = None
    dtype: torch.dtype | None = None

    def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Compute y and the final W: without gradients where the call is eager, else by the custom op."""
        tokens, (W, cu_seqlens, dtype) = self.tokens(inputs), inputs[6:]
        if self.eager:
            plan = self.plan or self.make_plan(tokens, cu_seqlens, dtype, False)
            outputs = plan.forward(tokens, W, cu_seqlens, False)
        else:
            W = self.operator.zeros(tokens, cu_seqlens, self.settings) if W is None else W
            keep = wants_gradients(*tokens, W)
            outputs = self.operator.op(*tokens, W, cu_seqlens, dtype, keep, *self.settings)
        return outputs[0], outputs[1]

    def tokens(self, inputs: tuple[Any, ...]) -> Tokens:
        """Return q, k, v, a, e and w of a call, w None where it is e."""
        q, k, v, a, e, w = inputs[:6]
        return q, k, v, a, e, None if self.tied else w

    def make_plan(self, tokens: Tokens, cu_seqlens: Tensor | None, dtype: torch.dtype, keep: bool) -> Passes:
        """Make the plan for calls like this one."""
        if self.operator.plan is None:
            self.dtype = dtype
            return self
        self.plan = self.operator.plan(tokens, cu_seqlens, dtype, keep, *self.settings)
        return self.plan

    def forward(self, tokens: Tokens, W: Tensor | None, cu_seqlens: Tensor | None, keep: bool) -> Sequence[Any]:
        W = self.operator.zeros(tokens, cu_seqlens, self.settings) if W is None else W
        outputs: Sequence[Any] = self.operator.forward(tokens, W, cu_seqlens, self.dtype, keep, *self.settings)
        return outputs

    def backward(
        self, tokens: Tokens, dy: Tensor, dW_end: Tensor | None, kept: Kept, cu_seqlens: Tensor | None, wants_dW: bool
    ) -> Gradients:
        grads = self.operator.backward(dy, dW_end, tokens, kept, cu_seqlens, *self.settings)
        return _by_input(grads, tokens, wants_dW)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: Bound, *inputs: Any) -> tuple[Tensor, Tensor]:
        tokens, (W, cu_seqlens, dtype), keep = bound.tokens(inputs), inputs[6:], True in ctx.needs_input_grad
        plan = bound.plan or bound.make_plan(tokens, cu_seqlens, dtype, keep)
        y, W_end, *kept = plan.forward(tokens, W, cu_seqlens, keep)
        ctx.save_for_backward(*tokens, W if ctx.needs_input_grad[7] else None, cu_seqlens, *kept)
        ctx.bound, ctx.plan, ctx.dtype = bound, plan, dtype
        # PyTorch would write zeros for the gradient of a state that is not used, and kernels read them.
        ctx.set_materialize_grads(False)
        return y, W_end

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dW: Tensor | None) -> Gradients:
        saved, wants_dW = ctx.saved_tensors, ctx.needs_input_grad[7]
        tokens, cu_seqlens, kept = saved[:6], saved[7], saved[8:]
        if dy is None:
            dy = tokens[2].new_zeros(tokens[2].shape, dtype=ctx.dtype)
        if is_eager_gradient(dy, dW):
            grads = ctx.plan.backward(tokens, dy, dW, kept, cu_seqlens, wants_dW)
        else:
            grads = _gradients_by_custom_op(ctx.bound, dy, dW, saved, wants_dW)
        return None, *grads, None, None


# `Function.apply` first looks for torch.func, which `is_eager` has done.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Eager).apply


def _gradients_by_custom_op(
    bound: Bound, dy: Tensor, dW: Tensor | None, saved: Sequence[Any], wants_dW: bool
) -> Gradients:
    """Return the gradients of a backward pass that is batched, or traced to be differentiated again."""
    operator, tokens, W, cu_seqlens, kept = bound.operator, saved[:6], saved[6], saved[7], saved[8:]
    # What eager calls do not keep is empty.
    kept = (*kept, *[kept[0][:0]] * (len(operator.axes) - 8 - len(kept)))
    _refuse_tangents(dy, dW)
    if level := batch_level(dy, dW):
        (first, dim), (second, dim_of_W) = without_batch(dy, level), without_batch(dW, level)
        n = len(second if dim is None else first)  # type: ignore[arg-type]
        arguments = (first, second, *tokens, *kept, cu_seqlens, *bound.settings)
        batched, dims = operator.more_heads(n, (dim, dim_of_W), arguments)
        grads = [torch._add_batch_dim(x, dim, level) for x, dim in zip(batched, dims, strict=True)]
    else:
        if W is not None:
            # So that second derivatives see that the states depend on the initial one.
            kept = (kept[0] + W.flatten()[:0].sum().to(kept[0].dtype), *kept[1:])
        grads = operator.backward_op(dy, dW, *tokens, *kept, cu_seqlens, *bound.settings)
    return _by_input(grads, tokens, wants_dW)


class ChunkedOperator(Operator):
    """The operator of a backend that keeps one state before each chunk, and causality for all values.

    Args:
        forward, backward: what `ops.causality` runs.
        chunk_starts: from q, cu_seqlens and a chunk's length to the row and time of the first token of each chunk, in
            the order in which states are kept.
        chunk_length: from D and M to the length of a chunk.
        kept_dtype: from q, k, v, the decays and W to the dtype of the states that are kept.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        chunk_starts: Callable[..., list[tuple[int, int]]],
        chunk_length: Callable[[int, int], int],
        device_types: str | None = None,
        kept_dtype: Callable[..., torch.dtype] = lambda q, k, v, a, W: W.dtype,
    ) -> None:
        def forward_in_order(
            tokens: Tokens, W: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype, keep: bool, chunk: int, log: bool
        ) -> Sequence[Tensor]:
            starts = partial(chunk_starts, tokens[0], cu_seqlens, chunk)
            return causality.forward(forward, starts, tokens, W, cu_seqlens, log, dtype, keep, chunk)

        def backward_in_order(
            dy: Tensor, dW: Tensor | None, tokens: Tokens, kept: Kept, cu_seqlens: Tensor | None, chunk: int, log: bool
        ) -> list[Tensor]:
            starts = partial(chunk_starts, tokens[0], cu_seqlens, chunk)
            return causality.backward(backward, starts, dy, dW, tokens, kept[0], cu_seqlens, log, chunk)

        def empty(
            tokens: Tokens, W: Tensor, cu_seqlens: Tensor | None, keep: bool, chunk: int, *_: Any
        ) -> list[Tensor]:
            count = number_of_chunks(tokens[0], chunk, cu_seqlens) if keep else 0
            return [W.new_empty((count, *W.shape[1:]), dtype=kept_dtype(*tokens[:4], W))]

        functions = (forward_in_order, backward_in_order)
        super().__init__(name, *functions, "SymInt chunk, bool log", {"before": 1}, empty, device_types=device_types)
        self.chunk_length = chunk_length

    def recurrence(self, *inputs: Any, eager: bool = False, log: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the recurrence, as `ops.family.Recurrence` has it; with `log`, a is the logarithm of the decays."""
        q, k, v, a, *rest = inputs
        if log and a is not None:
            inputs = (q, k, v, a.clamp(min=LOG_OF_ZERO), *rest)
        chunk = self.chunk_length(k.shape[-1], v.shape[-1])
        y, W_end = self.bind((chunk, log), eager, wants_gradients(*inputs[:7]))(*inputs)
        return y, W_end


def _refuse_tangents(*grads: Tensor | None) -> None:
    for grad in grads:
        if grad is not None:
            refuse_tangent(grad, "the fast weight memory")


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, cu_seqlens, dtype, _ = inputs[:10]
    ctx.save_for_backward(*tensors, *output[2:], cu_seqlens)
    ctx.dtype, ctx.settings = dtype, inputs[10:]
    ctx.set_materialize_grads(False)


def _by_input(grads: Sequence[Tensor], tokens: Sequence[Any], wants_dW: bool) -> Gradients:
    """Return a gradient or None for each of q, k, v, a, e, w and W, given those of the ones that are not None."""
    following = iter(grads)
    return *[None if x is None else next(following) for x in tokens[:6]], next(following) if wants_dW else None
