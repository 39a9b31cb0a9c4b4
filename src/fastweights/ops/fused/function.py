"""A function in plain PyTorch with kernels for eager calls, as autograd and whatever else looks on see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.eager import is_eager, is_eager_gradient, wants_gradients

Tensors = Sequence[Any]


class FusedFunction:
    """Runs kernels where nothing but autograd looks on, else `plain`: under torch.compile, torch.func, or fake tensors.

    Args:
        plain: `plain(*tensors, *settings)`, the outputs in PyTorch. Any derivative of them can be taken: where the
            gradients of the kernels are differentiated again or come in batches, these are used.
        forward: `forward(tensors, settings)`, the same outputs.
        backward: `backward(grads, tensors, settings)`, the gradients of all tensors, given those of the outputs, of
            which some, but not all, may be None; with `outputs` it also takes, in the end, what was kept.
        refuses: `refuses(tensors, settings)`, why the kernels are not for such a call; None where they are.
        outputs: how many tensors of `forward` are outputs, if not all: those after them are kept for `backward`.
    """

    def __init__(
        self,
        plain: Callable[..., tuple[Tensor, ...]],
        forward: Callable[[Tensors, Tensors], tuple[Tensor, ...]],
        backward: Callable[..., Tensors],
        refuses: Callable[[Tensors, Tensors], str | None],
        outputs: int | None = None,
    ) -> None:
        self.plain, self.forward, self.backward, self.refuses = plain, forward, backward, refuses
        self.outputs = outputs

    def __call__(self, tensors: Tensors, *settings: Any) -> tuple[Tensor, ...]:
        """Return the outputs for these tensors, of which some may be None."""
        if not is_eager(*tensors) or self.refuses(tensors, settings) is not None:
            return self.plain(*tensors, *settings)
        if wants_gradients(*tensors):
            outputs: tuple[Tensor, ...] = _Eager.apply(self, settings, *tensors)
            return outputs
        return self.forward(tensors, settings)[: self.outputs]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: FusedFunction, settings: Tensors, *tensors: Any) -> tuple[Tensor, ...]:
        found = function.forward(tensors, settings)
        ctx.save_for_backward(*tensors, *(() if function.outputs is None else found[function.outputs :]))
        ctx.function, ctx.settings = function, settings
        ctx.set_materialize_grads(False)
        return found[: function.outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        if all(dy is None for dy in grads):
            return (None,) * (2 + len(wanted))
        tensors, kept = ctx.saved_tensors[: len(wanted)], ctx.saved_tensors[len(wanted) :]
        if is_eager_gradient(*grads):
            more = () if ctx.function.outputs is None else (kept,)
            found = ctx.function.backward(grads, tensors, ctx.settings, *more)
            return None, None, *(x if wants else None for x, wants in zip(found, wanted, strict=True))
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            outputs = ctx.function.plain(*tensors, *ctx.settings)
        pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if dy is not None]
        inputs = [x for x, wants in zip(tensors, wanted, strict=True) if wants]
        ys, dys = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, inputs, dys, create_graph=again, allow_unused=True))
        return None, None, *(next(found) if wants else None for wants in wanted)
