"""Maps of queries and keys with their normalisation in C++, csrc/layers/features.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.cpu.build import library, refuses_tensors
from fastweights.ops.cpu.views import KINDS, View, rows
from fastweights.ops.features import Features, MapFeatures
from fastweights.ops.fused.function import Tensors
from fastweights.ops.normalization import l2_normalize, smooth_l2_normalize, sum_normalize

MAPS = {"none": 0, "elu": 1, "relu": 2, "silu": 3, "dpfp": 4, "favor": 5}
NORMS: dict[Callable[[Tensor], Tensor] | None, int] = {
    None: 0,
    sum_normalize: 1,
    smooth_l2_normalize: 2,
    l2_normalize: 3,
}

AnyFeatures = Features | MapFeatures


class Mapping(ctypes.Structure):
    """What heads of size r go through to become features of size D, as the C++ has it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("r", "D", "nu", "map", "norm", "m", "divided")),
        *((name, ctypes.c_double) for name in ("scale", "inner")),
        ("vectors", View),
    )

    @classmethod
    def of(cls, features: AnyFeatures, r: int, vectors: Tensor | None, divided: bool) -> Mapping:
        """Describe features that `unknown` has no objection to; `vectors` are those of FAVOR+, contiguous."""
        scale, m = features.scale, 0 if vectors is None else len(vectors)
        if isinstance(features, Features):
            norm = 1 if features.sum else 2 if features.l2 else 0
            found = cls(r, features.size(r), features.nu, MAPS[features.map], norm, m, divided, scale, features.inner)
        else:
            phi: Any = features.phi
            nu, inner = getattr(phi, "nu", 0), getattr(phi, "inner", 1.0)
            found = cls(r, phi.dim, nu, MAPS[phi.kernel], NORMS[features.normalize], m, divided, scale, inner)
        if vectors is not None:
            found.vectors = View(vectors.data_ptr(), 0, r, 0, KINDS[vectors.dtype], vectors.element_size())
        return found


class Heads(ctypes.Structure):
    """One call to the C++."""

    _fields_ = (
        ("mapping", Mapping),
        *((name, ctypes.c_int64) for name in ("wide", "B", "Tq", "Tk", "H")),
        *((name, View) for name in ("q", "k", "phi_q", "phi_k", "dphi_q", "dphi_k", "dq", "dk")),
    )


def unknown(features: Any) -> str | None:
    """Say what of these features the C++ does not know; None where it knows all."""
    if isinstance(features, Features):
        # The vectors of FAVOR+ are with its map.
        known = features.map in MAPS and features.map != "favor"
        return None if known else f"it does not know the feature map {features.map!r}"
    if not isinstance(features, MapFeatures) or features.phi.kernel not in MAPS or features.normalize not in NORMS:
        return "it does not know this feature map, or this normalisation"
    return None


def refuses(tensors: Tensors, settings: Tensors) -> str | None:
    """Say why the C++ is not for such a call; None where it is."""
    features = settings[0]
    if isinstance(features, Features) and not (features.maps or features.sum or features.l2):
        return "there is nothing to compute"
    return unknown(features) or refuses_tensors(*tensors)


def forward(tensors: Tensors, settings: Tensors) -> tuple[Any, ...]:
    """Return phi of queries and keys."""
    features, _, dtype, by_head = settings
    phi = [None if x is None else _empty(x, features.size(x.shape[3]), dtype, by_head) for x in tensors[:2]]
    _call(tensors, settings, phi_q=phi[0], phi_k=phi[1])
    return tuple(phi)


def backward(grads: Tensors, tensors: Tensors, settings: Tensors) -> Tensors:
    """Return the gradients of queries and keys; None for those without a gradient of what became of them."""
    *heads, vectors = tensors
    given = [None if dphi is None else x for x, dphi in zip(heads, grads, strict=True)]
    found = [None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in given]
    dphi = [rows(x) for x in grads]
    _call([*given, vectors], settings, dphi_q=dphi[0], dphi_k=dphi[1], dq=found[0], dk=found[1])
    return [*found, None]


def _empty(x: Tensor, D: int, dtype: torch.dtype, by_head: bool) -> Tensor:
    """Return room for (B, T, H, D), where the tokens of a head stand one after another if it is `by_head`."""
    B, T, H, _ = x.shape
    return torch.empty(B, H, T, D, dtype=dtype).transpose(1, 2) if by_head else torch.empty(B, T, H, D, dtype=dtype)


def _call(tensors: Tensors, settings: Tensors, **views: Tensor | None) -> None:
    features, divided, *_ = settings
    q, k = rows(tensors[0]), rows(tensors[1])
    # Where this is a copy, it must live until the function returns.
    vectors = None if tensors[2] is None else tensors[2].contiguous()
    some = k if q is None else q
    B, _, H, r = some.shape
    lengths = (0 if x is None else x.shape[1] for x in (q, k))
    mapping = Mapping.of(features, r, vectors, divided)
    call = Heads(mapping, some.dtype == torch.float64, B, *lengths, H)
    for name, tensor in {"q": q, "k": k, **views}.items():
        if tensor is not None:
            setattr(call, name, View.of(tensor))
    library().fastweights_features(ctypes.byref(call))
