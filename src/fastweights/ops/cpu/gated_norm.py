"""The gated root-mean-square norm in C++, csrc/layers/gated_norm.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastweights.ops.cpu.build import library, refuses_tensors
from fastweights.ops.cpu.views import View, rows
from fastweights.ops.fused.function import Tensors

OPENINGS = {None: 0, "silu": 1, "sigmoid": 2}
# Heads are worked on in up to this many parts, which does not depend on the number of threads.
_PARTS = 32


class Norm(ctypes.Structure):
    """One call to the C++."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "T", "H", "M", "opening", "parts")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, View) for name in ("x", "weight", "gate", "y", "dy", "dx", "dgate")),
        ("dweight", ctypes.c_void_p),
    )


def refuses(tensors: Tensors, settings: Tensors) -> str | None:
    """Say why the C++ is not for such a call; None where it is."""
    return refuses_tensors(*tensors)


def forward(tensors: Tensors, settings: Tensors) -> tuple[Tensor]:
    """Return y."""
    y = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
    _call(tensors, settings, y=y)
    return (y,)


def backward(grads: Tensors, tensors: Tensors, settings: Tensors) -> Tensors:
    """Return the gradients of x, weight and gate."""
    x, weight, gate = tensors
    dx = torch.empty(x.shape, dtype=x.dtype)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype)
    parts = torch.empty(_parts(x), x.shape[3], dtype=torch.float64)
    _call(tensors, settings, parts, dy=rows(grads[0]), dx=dx, dgate=dgate)
    return dx, parts.sum(0).to(weight.dtype), dgate


def _parts(x: Tensor) -> int:
    return min(_PARTS, x.shape[:3].numel())


def _call(tensors: Tensors, settings: Tensors, parts: Tensor | None = None, **views: Tensor | None) -> None:
    x, weight, gate = rows(tensors[0]), rows(tensors[1], 0), rows(tensors[2])
    opening, eps, scale = settings
    call = Norm(*x.shape, OPENINGS[opening], _parts(x), eps, scale)
    call.weight, call.dweight = View.of(weight, 0), None if parts is None else parts.data_ptr()
    for name, tensor in {"x": x, "gate": gate, **views}.items():
        setattr(call, name, View.of(tensor))
    library().fastweights_gated_norm(ctypes.byref(call))
