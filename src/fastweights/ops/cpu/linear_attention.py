"""Linear attention without a direction of time in C++, csrc/layers/linear_attention.cpp."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.cpu.build import library, refuses_tensors
from fastweights.ops.cpu.features import AnyFeatures, Mapping, unknown
from fastweights.ops.cpu.views import View, rows
from fastweights.ops.fused.function import Tensors

# Numbers that the weights of a head, and the tokens beside them, may have: they stay in the second cache.
_MOST_WEIGHTS = 2**17


class Attention(ctypes.Structure):
    """One call to the C++."""

    _fields_ = (
        ("mapping", Mapping),
        *((name, ctypes.c_int64) for name in ("wide", "B", "T", "S", "H", "M", "normalized", "weights")),
        *((name, ctypes.c_void_p) for name in ("mask", "W", "z")),
        *((name, View) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")),
    )


def refuses(tensors: Tensors, settings: Tensors) -> str | None:
    """Say why the C++ is not for such a call; None where it is."""
    q, k, v, mask, _ = tensors
    features, _ = settings
    if reason := unknown(features) or refuses_tensors(q, k, v):
        return reason
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to compute"
    if not q.dtype == k.dtype == v.dtype or k.shape[:3] != v.shape[:3]:
        return "keys and values do not go together"
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2] or mask.device.type != "cpu"):
        return "the mask is not one truth value for each key"
    return None


def refuses_reading(q: Tensor, W: Tensor, z: Tensor | None, features: AnyFeatures) -> str | None:
    """Say why the C++ does not read a state W (B, H, D, M), z (B, H, D) with these queries; None where it does."""
    if reason := unknown(features) or refuses_tensors(q, W, z):
        return reason
    B, _, H, R = q.shape
    if 0 in (*q.shape, *W.shape):
        return "there is nothing to compute"
    state = (B, H, features.size(R))
    if W.shape[:3] != state or W.dtype != torch.promote_types(q.dtype, torch.float32):
        return f"a state beside queries {tuple(q.shape)} is {(*state, W.shape[3])}, got {W.dtype} {tuple(W.shape)}"
    return None if z is None or (z.shape == state and z.dtype == W.dtype) else "z does not go with W"


def forward(tensors: Tensors, settings: Tensors) -> tuple[Tensor]:
    """Return y."""
    q, k, v, mask, vectors = tensors
    y = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
    _call(settings, vectors, mask, q=q, k=k, v=v, y=y)
    return (y,)


def backward(grads: Tensors, tensors: Tensors, settings: Tensors, kept: Tensors) -> Tensors:
    """Return the gradients of q, k and v."""
    q, k, v, mask, vectors = tensors
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    _call(settings, vectors, mask, q=q, k=k, v=v, dy=grads[0], dq=dq, dk=dk, dv=dv)
    return dq, dk, dv, None, None


def write(
    k: Tensor, v: Tensor, mask: Tensor | None, vectors: Tensor | None, features: AnyFeatures, normalized: bool
) -> tuple[Tensor, Tensor]:
    """Return W (B, H, D, M) and z (B, H, D) of all keys and values."""
    B, _, H, R = k.shape
    wide = torch.promote_types(k.dtype, torch.float32)
    W = torch.empty(B, H, features.size(R), v.shape[3], dtype=wide)
    z = torch.empty(W.shape[:3], dtype=wide)
    _call((features, normalized), vectors, mask, W, z, k=k, v=v)
    return W, z


def read(q: Tensor, vectors: Tensor | None, W: Tensor, z: Tensor | None, features: AnyFeatures) -> Tensor:
    """Return what queries find in W and z."""
    y = torch.empty(*q.shape[:3], W.shape[3], dtype=q.dtype)
    W, z = W.contiguous(), None if z is None else z.contiguous()
    _call((features, z is not None), vectors, None, W, z, q=q, y=y)
    return y


def _call(
    settings: Tensors,
    vectors: Tensor | None,
    mask: Tensor | None,
    W: Tensor | None = None,
    z: Tensor | None = None,
    **tensors: Tensor,
) -> None:
    features, normalized = settings
    views = {name: rows(x) for name, x in tensors.items()}
    q, k, v = (views.get(name) for name in "qkv")
    heads: Any = k if q is None else q
    values: Any = W if v is None else v
    (B, _, H, r), M = heads.shape, values.shape[3]
    T, S = (0 if x is None else x.shape[1] for x in (q, k))
    vectors = None if vectors is None else vectors.contiguous()
    mask = None if mask is None else mask.contiguous()
    mapping = Mapping.of(features, r, vectors, normalized)
    D = mapping.D
    # The order with fewer products, as long as all weights have room beside each other.
    few = T * S * (D + M) <= (T + S) * D * M and max(T * S, (T + S) * (D + M)) <= _MOST_WEIGHTS
    call = Attention(mapping, heads.dtype == torch.float64, B, T, S, H, M, normalized, W is None and few)
    call.mask, call.W, call.z = (None if x is None else x.data_ptr() for x in (mask, W, z))
    for name, x in views.items():
        setattr(call, name, View.of(x))
    library().fastweights_linear_attention(ctypes.byref(call))
