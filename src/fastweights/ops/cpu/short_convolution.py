"""The short convolution in C++, csrc/layers/short_convolution.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastweights.ops.cpu.build import library, refuses_tensors
from fastweights.ops.cpu.views import View, rows
from fastweights.ops.fused.function import Tensors
from fastweights.ops.spec import checked_bounds

MOST_TAPS = 16
# Sums over sequences are made of up to this many parts, which does not depend on the number of threads.
_PARTS = 8


class Convolution(ctypes.Structure):
    """One call to the C++."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "T", "N", "C", "taps", "silu", "parts")),
        ("bounds", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("mask", "starts")),
        *((name, View) for name in ("x", "weight", "bias", "recent", "y", "recent_end")),
        *((name, View) for name in ("dy", "drecent_end", "dx", "drecent")),
        ("dweight", ctypes.c_void_p),
    )


def refuses(tensors: Tensors, settings: Tensors) -> str | None:
    """Say why the C++ is not for such a call; None where it is."""
    x, weight, bias, recent, *_ = tensors
    if weight.shape[1] > MOST_TAPS:
        return f"it has room for {MOST_TAPS} taps, got {weight.shape[1]}"
    return refuses_tensors(x, weight, bias, recent)


def forward(tensors: Tensors, settings: Tensors) -> tuple[Tensor, Tensor]:
    """Return y and what is carried on."""
    x, weight, _, _, _, cu_seqlens, _ = tensors
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    y, recent_end = torch.empty(x.shape, dtype=x.dtype), x.new_empty(N, weight.shape[1] - 1, x.shape[2])
    end = _call(tensors, settings[0], y=y, recent_end=recent_end)
    y[:, end:] = 0
    return y, recent_end


def backward(grads: Tensors, tensors: Tensors, settings: Tensors) -> Tensors:
    """Return the gradients of x, weight, bias and recent."""
    dy, drecent_end = grads
    x, weight, bias, recent, _, cu_seqlens, _ = tensors
    N, taps = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, weight.shape[1]
    dy = x.new_zeros(x.shape) if dy is None else dy
    dx, drecent = torch.empty(x.shape, dtype=x.dtype), None if recent is None else recent.new_empty(recent.shape)
    parts = torch.empty(min(N, _PARTS), x.shape[2], taps + 1, dtype=torch.float64)
    end = _call(tensors, settings[0], parts, dy=rows(dy, 2), drecent_end=rows(drecent_end, 2), dx=dx, drecent=drecent)
    dx[:, end:] = 0
    dweight, dbias = parts.sum(0).split([taps, 1], 1)
    dbias = None if bias is None else dbias.squeeze(1).to(bias.dtype)
    return dx, dweight.to(weight.dtype), dbias, drecent, None, None, None


def _call(tensors: Tensors, silu: bool, parts: Tensor | None = None, **views: Tensor | None) -> int:
    """Run the C++, and return where the last sequence ends."""
    x, weight, bias, recent, mask, cu_seqlens, starts = tensors
    x, weight, bias, recent = rows(x, 2), rows(weight, 1), rows(bias, 0), rows(recent, 2)
    mask, starts = (None if marks is None else marks.contiguous() for marks in (mask, starts))
    (B, T, C), taps = x.shape, weight.shape[1]
    bounds = None if cu_seqlens is None else checked_bounds(cu_seqlens, T)
    N = B if bounds is None else len(bounds) - 1
    call = Convolution(B, T, N, C, taps, silu, 0 if parts is None else len(parts))
    if bounds is not None:
        call.bounds = (ctypes.c_int64 * len(bounds))(*bounds)
    call.mask, call.starts, call.dweight = (None if t is None else t.data_ptr() for t in (mask, starts, parts))
    call.weight, call.bias = View.of(weight, 1), View.of(bias, 0)
    for name, tensor in {"x": x, "recent": recent, **views}.items():
        setattr(call, name, View.of(tensor, 2))
    library().fastweights_short_convolution(ctypes.byref(call))
    return T if bounds is None else bounds[-1]
