"""The feed-forward kernels as custom operators, for autograd, `torch.compile` and CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.common.transforms import refuse_tangent
from fastweights.ops.gpu.feedforward import launch
from fastweights.ops.gpu.feedforward.self_check import check_of


def fused_feedforward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, p: float) -> Tensor:
    """Compute dropout(relu(x W_1^T + b_1)) W_2^T (n, d_model) by kernels; W_1 and W_2 in the dtype of x.

    Without dropout the random generator is left alone.
    """
    y, _ = output_and_middle(x, w1, b1, w2, new_seed(x.device) if p else x.new_zeros(2, dtype=torch.int64), p)
    return y


def new_seed(device: torch.device) -> Tensor:
    """Draw the two random numbers by which units are dropped, on the device."""
    return torch.randint(2**31 - 1, (2,), device=device)


@torch.library.custom_op("fastweights::feedforward", mutates_args=())
def output_and_middle(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute the output (n, d_model) and the middle (n, d_ff), which the gradient needs."""
    if reason := check_of(x.shape[1], len(w1), p).refusal(x.device):
        raise RuntimeError(f"{reason}; compile again with FeedForward.backend = 'dense'")
    return launch.forward(x, w1, b1, w2, seed, p)


gradients: Any = torch.library.custom_op("fastweights::feedforward_backward", launch.backward, mutates_args=())


@output_and_middle.register_fake
def _(x, w1, b1, w2, seed, p):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape[0], w1.shape[0])


@gradients.register_fake
def _(dy, x, w1, w2, middle, p):  # type: ignore[no-untyped-def]
    bias = x.new_empty(w1.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), w1.new_empty(w1.shape), bias, w2.new_empty(w2.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w1, b1, w2, _, ctx.p = inputs
    ctx.dtype = b1.dtype
    ctx.save_for_backward(x, w1, w2, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _):  # type: ignore[no-untyped-def]
    if dy is None:
        return (None,) * 6
    refuse_tangent(dy, "FeedForward")
    dx, d_w1, d_b1, d_w2 = gradients(dy, *ctx.saved_tensors, ctx.p)
    return dx, d_w1, d_b1.to(ctx.dtype), d_w2, None, None


output_and_middle.register_autograd(_backward, setup_context=_setup_context)
