"""What every backend of the family does for autograd and `torch.compile`, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

Gradients = tuple[Tensor | None, ...]


def differentiable(forward: Any, backward: Any) -> None:
    """Make the custom op `forward` differentiable by the custom op `backward`.

    They are `forward(q, k, v, a, e, w, W, cu_seqlens, dtype, keep, *settings)`, which returns y, the final W and what
    it keeps, and `backward(dy, dW, q, k, v, a, e, w, *kept, cu_seqlens, *settings)`, which returns the gradients of q,
    k, v, the coefficients that are there, and the initial W. dW is None where nobody asked about the final state.
    """

    def run(ctx: Any, dy: Tensor | None, dW: Tensor | None, *_: Any) -> Gradients:
        return _gradients(backward, ctx, dy, dW)

    forward.register_autograd(run, setup_context=_remember)


def direct(forward: Callable[..., Any], backward: Callable[..., Any], backward_op: Any) -> Callable[..., Any]:
    """y and the final W by plain functions like those ops, for calls that are `plain`.

    The Python around a custom op takes longer than a short sequence, and its first call imports PyTorch's compiler.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            # What is kept is an output, too, so that second derivatives see that it depends on the initial W.
            outputs: tuple[Tensor, ...] = forward(*inputs)
            _remember(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, dW: Tensor | None, *_: Tensor | None) -> Gradients:
            return _gradients(backward if plain_gradient(dy, dW) else backward_op, ctx, dy, dW)

    # `Function.apply` first looks for torch.func, which `plain` has done.
    apply = super(torch.autograd.Function, Direct).apply

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        keep = inputs[9]
        y, W, *_ = apply(*inputs) if keep else forward(*inputs)
        return y, W

    return run


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, cu_seqlens, dtype, _ = inputs[:10]
    ctx.save_for_backward(*tensors, *output[2:], cu_seqlens)
    ctx.dtype, ctx.settings = dtype, inputs[10:]
    # Zeros for the gradients of states nobody asked about would be written and read for nothing.
    ctx.set_materialize_grads(False)


def _gradients(backward: Any, ctx: Any, dy: Tensor | None, dW: Tensor | None) -> Gradients:
    *saved, cu_seqlens = ctx.saved_tensors
    if dy is None:
        dy = saved[2].new_zeros(saved[2].shape, dtype=ctx.dtype)
    grads = iter(backward(dy, dW, *saved, cu_seqlens, *ctx.settings))
    found = [None if x is None else next(grads) for x in saved[:6]]
    return *found, next(grads), *[None] * (3 + len(ctx.settings))


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may come."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def watched() -> bool:
    """Whether something that traces or counts stands between a call and its kernels, and should see custom ops."""
    transforms = torch._C._are_functorch_transforms_active()
    if transforms or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return True
    # A default device is no reason: whoever makes a tensor here says where.
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    return any(type(mode) is not DeviceContext for mode in modes)


_PLAIN = (Tensor, torch.nn.Parameter)


def plain(*tensors: Any) -> bool:
    """Whether nothing but autograd looks on, and all are numbers as they stand in memory."""
    if torch.compiler.is_compiling() or watched():
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_meta or x.is_neg() or x._is_zerotensor()):
            return False
    return True


def plain_gradient(*grads: Tensor | None) -> bool:
    """Whether a backward pass may be plain, too: where it may be differentiated again, custom ops raise an error."""
    return not torch.is_grad_enabled() and plain(*grads)


def like_inputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, e: Tensor | None, w: Tensor | None) -> list[Tensor]:
    """What the gradients of those that are there look like, for fake tensors."""
    return [x.new_empty(x.shape) for x in (q, k, v, a, e, w) if x is not None]
