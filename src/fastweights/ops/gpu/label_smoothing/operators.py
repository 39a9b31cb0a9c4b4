"""The kernels of the softmax with label smoothing, for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.common.transforms import batched, is_transformed
from fastweights.ops.gpu.label_smoothing import launch


def fused_nll(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Compute the losses (N,) of targets (N,) under logits (N, V), smoothed and not, float32."""
    smoothed, nll = _FusedLosses.apply(logits, targets, smoothing)
    return smoothed, nll


class _FusedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        logits, targets = logits.contiguous(), targets.contiguous()
        smoothed, nll, totals = launch.forward(logits, targets, smoothing)
        ctx.save_for_backward(logits, targets, totals)
        ctx.smoothing = smoothing
        ctx.set_materialize_grads(False)
        return smoothed, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_smoothed: Tensor | None, d_nll: Tensor | None) -> tuple[Tensor | None, None, None]:
        logits, targets, totals = ctx.saved_tensors
        if d_smoothed is None and d_nll is None:
            return None, None, None
        d_smoothed = torch.zeros_like(totals) if d_smoothed is None else d_smoothed
        backward = plain_gradient if is_transformed() or batched(d_smoothed, d_nll) else launch.backward
        return backward(d_smoothed, d_nll, logits, targets, totals, ctx.smoothing), None, None


def plain_gradient(
    d_smoothed: Tensor, d_nll: Tensor | None, logits: Tensor, targets: Tensor, totals: Tensor, smoothing: float
) -> Tensor:
    """Compute the gradient of the logits in plain PyTorch, for gradients that are batched or have tangents."""
    g, h = d_smoothed.unsqueeze(1), 0 if d_nll is None else d_nll.unsqueeze(1)
    p = (logits.float() - totals.unsqueeze(1)).exp()
    target = torch.nn.functional.one_hot(targets, logits.shape[1])
    return ((g + h) * p - ((1 - smoothing) * g + h) * target - g * smoothing / logits.shape[1]).to(logits.dtype)
