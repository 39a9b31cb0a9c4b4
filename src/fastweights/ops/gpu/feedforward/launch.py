"""Launches the feed-forward kernels: the wide middle is written once, relu and dropout where the product is made.

What dropout drew need not be kept: an entry that is 0 afterwards has no gradient, whichever of the two made it so.
Triton is imported when the kernels first run. n tokens of size d_model, d_ff entries in the middle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops.gpu.device import use_device_of

# Tokens in a tile, wide entries in a step, steps in a program, warps and stages, by the largest d_model.
TILES = {128: (128, 64, 4, 4, 2), 256: (64, 64, 4, 4, 2)}


class Gradients(NamedTuple):
    """Gradients of the four inputs; that of b_1 is at least float32."""

    x: Tensor  # (n, d_model)
    w1: Tensor  # (d_ff, d_model)
    b1: Tensor  # (d_ff,)
    w2: Tensor  # (d_model, d_ff)


def _constants(x: Tensor, p: float) -> dict[str, Any]:
    """Return the compile-time arguments that both kernels take."""
    d = x.shape[1]
    tile, step, span, warps, stages = next(sizes for largest, sizes in TILES.items() if largest >= d)
    sizes = {"TILE": tile, "STEP": step, "SPAN": span, "BLOCK_K": max(16, 1 << (d - 1).bit_length())}
    return {**sizes, "SCALE": 1 / (1 - p), "num_warps": warps, "num_stages": stages}


def forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute y = dropout(relu(x W_1^T + b_1)) W_2^T (n, d_model) and its middle (n, d_ff)."""
    import triton.language as tl

    from fastweights.ops.gpu.feedforward.kernels import widen

    x, w1 = x.contiguous(), w1.contiguous()
    (n, K), F = x.shape, len(w1)
    middle = x.new_empty(n, F)
    constants = _constants(x, p) | {
        "THRESHOLD": min(round(p * 2**32), 2**32 - 1),
        "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
    }
    grid = -(-n // constants["TILE"]) * -(-F // (constants["STEP"] * constants["SPAN"]))
    with use_device_of(x):
        widen[(grid,)](x, w1, b1, seed, middle, n, K, F, **constants)
    return middle @ w2.mT, middle


def backward(dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, middle: Tensor, p: float) -> Gradients:
    """Compute the gradients under `dy` (n, d_model) from the middle that `forward` returned."""
    from fastweights.ops.gpu.feedforward.kernels import widen_gradient

    dy, x, w2 = dy.contiguous(), x.contiguous(), w2.contiguous()
    (n, K), F = dy.shape, middle.shape[1]
    constants = _constants(x, p)
    tiles = -(-n // constants["TILE"])
    d_middle = torch.empty_like(middle)
    d_bias = x.new_empty(tiles, F, dtype=torch.promote_types(x.dtype, torch.float32))
    grid = tiles * -(-F // (constants["STEP"] * constants["SPAN"]))
    with use_device_of(x):
        widen_gradient[(grid,)](dy, w2, middle, d_middle, d_bias, n, K, F, **constants)
    return Gradients(d_middle @ w1, d_middle.mT @ x, d_bias.sum(0), dy.mT @ middle)
