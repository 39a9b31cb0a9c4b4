"""How tensors travel to the C++: as addresses, strides and the kind of their numbers, which csrc/call.h mirrors."""

from __future__ import annotations

import ctypes
from typing import Any

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


def rows(x: Any, axes: int = 3) -> Any:
    """Return x with a contiguous last axis where that is not among the first `axes`, as `View.of` takes it."""
    return x if x is None or x.dim() <= axes or x.stride(-1) == 1 else x.contiguous()
