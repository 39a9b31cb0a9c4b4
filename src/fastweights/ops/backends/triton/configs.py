"""Launch configurations: a fixed table by data type and head size, no autotuning."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# How products are formed: from 16-bit operands, from float32 rounded to TF32, from three TF32 products (22 bits), or
# in plain float32. The index into this tuple is what a configuration holds.
PRECISIONS = ("16-bit", "tf32", "tf32x3", "ieee")
HALF, TF32, TF32X3, IEEE = range(4)

LARGEST_D, LARGEST_M = 512, 256


class Config(NamedTuple):
    """One row of the table. All integers, so that it passes through a custom op.

    A walk takes `chunk` tokens a step and `columns` of the state a program. With `prepared` the inverses of the chunks
    come from a launch of their own, over chunks side by side. With `fused` the walk back computes every gradient;
    otherwise a second launch over chunks does, whose programs take `features` of D at a time. `stages` is how far loads
    run ahead in a walk. `precision` and `solve` are how products and how the triangular inverse are formed.
    """

    chunk: int
    columns: int
    precision: int
    solve: int
    fused: int
    prepared: int
    forward_warps: int
    forward_stages: int
    backward_warps: int
    backward_stages: int
    invert_warps: int
    chunk_warps: int
    features: int


def _fused(chunk: int, columns: int, precision: int, solve: int, warps: int, stages: int) -> Config:
    return Config(chunk, columns, precision, solve, 1, 0, warps, stages, warps, stages, 1, 1, 16)


def _split(
    chunk: int,
    columns: int,
    precision: int,
    solve: int,
    walk: tuple[int, int],
    invert_warps: int,
    chunks: tuple[int, int],
) -> Config:
    """`walk` is (warps, stages) of both walks, `chunks` (warps, features) of the launch for the gradients."""
    return Config(chunk, columns, precision, solve, 0, 1, *walk, *walk, invert_warps, *chunks)


# The largest D and M a row is for, smallest first. float16 takes TF32 products: its range is too short for a state.
TABLE: dict[torch.dtype, dict[tuple[int, int], Config]] = {
    torch.bfloat16: {
        (32, 16): _fused(16, 16, HALF, TF32, 1, 2),
        (32, 32): _fused(16, 32, HALF, TF32, 2, 2),
        (64, 16): _fused(16, 16, HALF, TF32, 2, 2),
        (64, 64): _split(32, 32, HALF, TF32, (2, 2), 1, (2, 64)),
        (128, 128): _split(32, 32, HALF, TF32, (4, 2), 2, (4, 64)),
        (256, 256): _split(32, 32, HALF, TF32, (8, 2), 2, (8, 64)),
        (512, 256): _split(16, 16, HALF, TF32, (8, 1), 1, (8, 64)),
    },
    torch.float16: {
        (32, 16): _fused(16, 16, TF32, TF32, 1, 2),
        (32, 32): _fused(16, 32, TF32, TF32, 2, 2),
        (64, 64): _split(16, 32, TF32, TF32, (2, 2), 1, (4, 32)),
        (128, 128): _split(16, 32, TF32, TF32, (4, 2), 1, (8, 32)),
        (512, 256): _split(16, 16, TF32, TF32, (8, 1), 1, (8, 32)),
    },
    torch.float32: {
        (16, 16): _fused(16, 16, TF32X3, TF32X3, 1, 1),
        (32, 16): _fused(16, 16, TF32X3, TF32X3, 2, 2),
        (32, 32): _fused(16, 32, TF32X3, TF32X3, 4, 1),
        (64, 64): _split(16, 32, TF32X3, TF32X3, (4, 1), 1, (4, 32)),
        (512, 256): _split(16, 16, TF32X3, TF32X3, (8, 1), 1, (8, 16)),
    },
    # The interpreter only: tests compare gradients with finite differences in it.
    torch.float64: {(512, 256): _split(16, 32, IEEE, IEEE, (4, 1), 1, (4, 64))},
}


def configuration(D: int, M: int, dtype: torch.dtype) -> Config:
    """The shipped configuration for keys of size D and values of size M."""
    return next(config for (keys, values), config in TABLE[dtype].items() if keys >= D and values >= M)


def power_of_two(n: int) -> int:
    """The least power of two that holds n and fills a matrix product."""
    return max(16, 1 << (n - 1).bit_length())


def kept_shapes(
    q: Tensor, v: Tensor, e: Tensor | None, cu_seqlens: Tensor | None, keep: bool, config: Config
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the states before each chunk and of the chunks' inverses, one slot a chunk; no slots where not kept.

    With packed sequences the number of chunks hangs on their lengths; the number of slots bounds it.
    """
    (B, T, H, D), M, C = q.shape, v.shape[3], config.chunk
    slots = B * -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.numel() - 1
    inverses = e is not None and (keep or bool(config.prepared))
    return (slots if keep else 0, H, M, D), (slots if inverses else 0, H, C, C)
