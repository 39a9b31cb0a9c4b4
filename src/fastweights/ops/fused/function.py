"""A function in plain PyTorch with kernels for eager calls, as autograd and whatever else looks on see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.eager import is_eager, is_eager_gradient, wants_gradients

Tensors = Sequence[Any]


@dataclass(frozen=True)
class Kernels:
    """One way to compute a function.

    Args:
        forward: `forward(tensors, settings)`, the outputs.
        backward: `backward(grads, tensors, settings)`, the gradients of all tensors, given those of the outputs, of
            which some, but not all, may be None; where `forward` returns more than outputs it also takes, in the end,
            what was kept.
        refuses: `refuses(tensors, settings)`, why the kernels are not for such a call; None where they are.
    """

    forward: Callable[[Tensors, Tensors], tuple[Tensor, ...]]
    backward: Callable[..., Tensors]
    refuses: Callable[[Tensors, Tensors], str | None]


class FusedFunction:
    """Runs kernels where nothing but autograd looks on, else `plain`: under torch.compile, torch.func, or fake tensors.

    Args:
        plain: `plain(*tensors, *settings)`, the outputs in PyTorch. Any derivative of them can be taken: where the
            gradients of the kernels are differentiated again or come in batches, these are used.
        kernels: the first that does not refuse a call runs it.
        outputs: how many tensors of `forward` are outputs, if not all: those after them are kept for `backward`.
        keeps: `keeps(wanted, settings)`, which tensors the gradients depend on, given which of them are wanted; by
            default all. Zeros of the same shape stand in for the others in `backward`.
    """

    def __init__(
        self,
        plain: Callable[..., tuple[Tensor, ...]],
        *kernels: Kernels,
        outputs: int | None = None,
        keeps: Callable[[Sequence[bool], Tensors], Sequence[bool]] | None = None,
    ) -> None:
        self.plain, self.kernels, self.outputs, self.keeps = plain, kernels, outputs, keeps

    def __call__(self, tensors: Tensors, *settings: Any) -> tuple[Tensor, ...]:
        """Return the outputs for these tensors, of which some may be None."""
        kernels = self._kernels(tensors, settings)
        if kernels is None:
            return self.plain(*tensors, *settings)
        if wants_gradients(*tensors):
            outputs: tuple[Tensor, ...] = _Eager.apply(self, kernels, settings, *tensors)
            return outputs
        return kernels.forward(tensors, settings)[: self.outputs]

    def _kernels(self, tensors: Tensors, settings: Tensors) -> Kernels | None:
        if is_eager(*tensors):
            for kernels in self.kernels:
                if kernels.refuses(tensors, settings) is None:
                    return kernels
        return None


def _zeros_like(x: Tensor) -> Tensor:
    """Return zeros in the memory of one number, which require a gradient if x does."""
    return x.new_zeros(()).expand_as(x).requires_grad_(x.requires_grad)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: FusedFunction, kernels: Kernels, settings: Tensors, *tensors: Any
    ) -> tuple[Tensor, ...]:
        found = kernels.forward(tensors, settings)
        ctx.stand_ins = (None,) * len(tensors)
        if function.keeps is not None:
            pairs = list(zip(tensors, function.keeps(ctx.needs_input_grad[3:], settings), strict=True))
            tensors = tuple(x if keep else None for x, keep in pairs)
            ctx.stand_ins = tuple(None if keep or x is None else _zeros_like(x) for x, keep in pairs)
        ctx.save_for_backward(*tensors, *(() if function.outputs is None else found[function.outputs :]))
        ctx.function, ctx.kernels, ctx.settings = function, kernels, settings
        ctx.set_materialize_grads(False)
        return found[: function.outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        if all(dy is None for dy in grads):
            return (None,) * (3 + len(wanted))
        # Asked for once: under gradient checkpointing each time would be one more forward pass, which PyTorch refuses.
        saved = ctx.saved_tensors
        tensors, kept = saved[: len(wanted)], saved[len(wanted) :]
        tensors = tuple(x if zeros is None else zeros for x, zeros in zip(tensors, ctx.stand_ins, strict=True))
        if is_eager_gradient(*grads):
            more = () if ctx.function.outputs is None else (kept,)
            found = ctx.kernels.backward(grads, tensors, ctx.settings, *more)
            return None, None, None, *(x if wants else None for x, wants in zip(found, wanted, strict=True))
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            # One input may have been computed from another, and what comes by that way is not asked for here.
            tensors = tuple(x.view_as(x) if wants else x for x, wants in zip(tensors, wanted, strict=True))
            outputs = ctx.function.plain(*tensors, *ctx.settings)
        pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if dy is not None]
        inputs = [x for x, wants in zip(tensors, wanted, strict=True) if wants]
        ys, dys = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, inputs, dys, create_graph=differentiable, allow_unused=True))
        return None, None, None, *(next(found) if wants else None for wants in wanted)
