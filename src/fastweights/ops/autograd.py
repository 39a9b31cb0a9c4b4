"""What every backend of the family does for autograd and `torch.compile`, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def differentiable(forward: Any, backward: Any) -> None:
    """Make the custom op `forward` differentiable by the custom op `backward`.

    They are `forward(q, k, v, a, e, w, W, cu_seqlens, dtype, keep, *settings)`, which returns y, the final W and what
    it keeps, and `backward(dy, dW, q, k, v, a, e, w, *kept, cu_seqlens, *settings)`, which returns the gradients of q,
    k, v, the coefficients that are there, and the initial W. dW is None where nobody asked about the final state.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, cu_seqlens, dtype, _ = inputs[:10]
        ctx.save_for_backward(*tensors, *output[2:], cu_seqlens)
        ctx.dtype, ctx.settings = dtype, inputs[10:]
        # Zeros for the gradients of states nobody asked about would be written and read for nothing.
        ctx.set_materialize_grads(False)

    def run(ctx: Any, dy: Tensor | None, dW: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, cu_seqlens = ctx.saved_tensors
        if dy is None:
            dy = saved[2].new_zeros(saved[2].shape, dtype=ctx.dtype)
        grads = iter(backward(dy, dW, *saved, cu_seqlens, *ctx.settings))
        found = [None if x is None else next(grads) for x in saved[:6]]
        return *found, next(grads), *[None] * (3 + len(ctx.settings))

    forward.register_autograd(run, setup_context=setup_context)


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may come."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def watched() -> bool:
    """Whether something that traces or counts stands between a call and its kernels, and should see custom ops."""
    return bool(torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def like_inputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, e: Tensor | None, w: Tensor | None) -> list[Tensor]:
    """What the gradients of those that are there look like, for fake tensors."""
    return [x.new_empty(x.shape) for x in (q, k, v, a, e, w) if x is not None]
