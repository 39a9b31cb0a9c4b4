"""Tensors of heads (B, T, H, M) as kernels read them that take heads one by one."""

from __future__ import annotations

from torch import Tensor


def readable(x: Tensor) -> Tensor:
    """Return x with heads that follow each other, and tokens that follow each other across batches."""
    B, T, H, M = x.shape
    batch, token, head, entry = x.stride()
    in_line = B == 1 or T == 1 or batch == T * token
    return x if entry == 1 and (H == 1 or head == M) and in_line else x.contiguous()


def token_stride(x: Tensor) -> int:
    """Return how many entries it is from a token to the next, which is in the next batch where each has one."""
    return x.stride(0 if x.shape[1] == 1 else 1)
