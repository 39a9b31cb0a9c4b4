"""How tensors travel to the C++: as addresses, strides and the kind of their numbers, which csrc/call.h mirrors."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class View(ctypes.Structure):
    """A tensor of up to three axes and, where it has features, one more; all zero where there is none."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("time", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
    )

    @classmethod
    def of(cls, x: Tensor | None, axes: int = 3) -> View:
        """The view of x, whose last axis is contiguous where it is not among the first `axes`."""
        if x is None:
            return cls()
        strides = (*x.stride()[:axes], 0, 0, 0)[:3]
        return cls(x.data_ptr(), *strides, KINDS[x.dtype], x.element_size())


def checked_bounds(cu_seqlens: Tensor, T: int, *, to_the_end: bool = True) -> list[int]:
    """Return the bounds of packed sequences if they rise from 0 to T: the C++ believes what it is told.

    Not `to_the_end`, the last one may be less.
    """
    bounds: list[int] = cu_seqlens.tolist()
    ends = bounds[-1] == T if to_the_end else bounds[-1] <= T
    if bounds[0] != 0 or not ends or any(a > b for a, b in pairwise(bounds)):
        end = f"T = {T}" if to_the_end else f"T = {T} or less"
        raise ValueError(f"cu_seqlens must rise from 0 to {end}, got {bounds[:20]}")
    return bounds
