"""Which tile sizes the softmax kernels run with."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """One row of the table. All integers, so that it passes through a custom op.

    The forward pass takes `tile` tokens and `step` rows of weights at a time, the backward pass `back_tile` rows and
    `back_step` tokens. In the forward pass a softmax of few tokens is split into parts of its rows, of `least` rows or
    more, in the backward pass the head into parts of the tokens, so that each makes up to `parts` programs.
    """

    tile: int
    step: int
    warps: int
    stages: int
    back_tile: int
    back_step: int
    back_warps: int
    back_stages: int
    parts: int = 512
    least: int = 1024


# The largest d_model a row is for, smallest first. Four warps: at eight Triton 3.6 has miscompiled other kernels.
TABLE: dict[torch.dtype, dict[int, Config]] = {
    torch.bfloat16: {
        64: Config(128, 64, 4, 3, 128, 64, 4, 3),
        128: Config(128, 32, 4, 3, 128, 32, 4, 3),
        256: Config(64, 32, 4, 3, 64, 32, 4, 3),
    },
    torch.float32: {128: Config(64, 16, 4, 2, 64, 16, 4, 2)},
    # The interpreter only.
    torch.float64: {256: Config(16, 16, 4, 1, 16, 16, 4, 1, parts=4, least=16)},
}
# 16-bit products need no more; float32 is made of three TF32 products, as in the memory's kernels.
PRECISION = {torch.bfloat16: "ieee", torch.float32: "tf32x3", torch.float64: "ieee"}


def configuration(dtype: torch.dtype, d: int) -> Config:
    """Return the shipped configuration for hidden vectors of size d."""
    return next(config for largest, config in TABLE[dtype].items() if largest >= d)
