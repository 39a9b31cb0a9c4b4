"""Launches the feed-forward kernels: the wide middle is written once, relu and dropout where the product is made.

What dropout drew need not be kept: an entry that is 0 afterwards has no gradient, whichever of the two made it so.
Triton is imported when the kernels first run. n tokens of size d_model, d_ff entries in the middle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.ops.gpu.device import use_device_of

# Tokens in a tile, wide entries in a step, steps in a program, warps and stages, by the largest d_model.
TILES = {128: (128, 64, 4, 4, 2), 256: (64, 64, 4, 4, 2)}


def _plan(x: Tensor, F: int, p: float, **more: Any) -> tuple[Any, int, dict[str, int]]:
    """Return what a kernel is compiled for, `more` included, how many programs it has, and their resources."""
    from fastweights.ops.gpu.feedforward.kernels import Options

    n, K = x.shape
    tile, step, span, warps, stages = next(sizes for largest, sizes in TILES.items() if largest >= K)
    split = {"tile": tile, "step": step, "span": span, "block_K": max(16, 1 << (K - 1).bit_length())}
    options = Options(K=K, F=F, **split, scale=1 / (1 - p), **more)
    return options, -(-n // tile) * -(-F // (step * span)), {"num_warps": warps, "num_stages": stages}


def forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute y = dropout(relu(x W_1^T + b_1)) W_2^T (n, d_model) and its middle (n, d_ff)."""
    import triton.language as tl

    from fastweights.ops.gpu.feedforward.kernels import widen

    x, w1, b1, n = x.contiguous(), w1.contiguous(), b1.contiguous(), len(x)
    middle = x.new_empty(n, len(w1))
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    options, grid, resources = _plan(x, len(w1), p, threshold=min(round(p * 2**32), 2**32 - 1), acc=acc)
    with use_device_of(x):
        widen[(grid,)](x, w1, b1, seed, middle, n, options, **resources)
    return middle @ w2.mT, middle


def backward(
    dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, middle: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of x, W_1, b_1 (at least float32) and W_2 under `dy` (n, d_model) from the middle."""
    from fastweights.ops.gpu.feedforward.kernels import widen_gradient

    dy, x, w2 = dy.contiguous(), x.contiguous(), w2.contiguous()
    n, F = middle.shape
    options, grid, resources = _plan(x, F, p)
    d_middle = torch.empty_like(middle)
    d_bias = x.new_empty(-(-n // options.tile), F, dtype=torch.promote_types(x.dtype, torch.float32))
    with use_device_of(x):
        widen_gradient[(grid,)](dy, w2, middle, d_middle, d_bias, n, options, **resources)
    return d_middle @ w1, d_middle.mT @ x, d_bias.sum(0), dy.mT @ middle
