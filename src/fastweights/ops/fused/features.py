"""Queries and keys through their feature map and normalisation: in PyTorch, in C++, and in GPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.ops.cpu import features as cpu
from fastweights.ops.features import Features, MapFeatures
from fastweights.ops.fused.function import FusedFunction, Kernels
from fastweights.ops.gpu.features import launch
from fastweights.ops.gpu.features.self_check import refuses


def map_heads(
    q: Tensor | None,
    k: Tensor | None,
    features: Features | MapFeatures,
    *,
    divided: bool,
    dtype: torch.dtype,
    by_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `features` make of queries (B, T, H, R) and keys (B, S, H, R), in `dtype`.

    Equivalent to `features.apply(q.to(dtype), k.to(dtype), divided)`; None stays None.

    Args:
        q: raw queries.
        k: raw keys.
        features: what they go through.
        divided: whether what queries read is divided by phi(q)·z, so that their scale is free.
        dtype: of the result.
        by_head: whether the tokens of a head are to stand one after another in memory, as products want them.
    """
    phi_q, phi_k = _FUNCTION((q, k, vectors_of(features)), features, divided, dtype, by_head)
    return phi_q, phi_k


def vectors_of(features: Features | MapFeatures) -> Tensor | None:
    """Return the vectors of FAVOR+ as they are now, None for other maps."""
    return features.vectors if isinstance(features, MapFeatures) else None


def plain_features(
    q: Tensor | None,
    k: Tensor | None,
    vectors: Tensor | None,
    given: Features | MapFeatures,
    divided: bool,
    dtype: torch.dtype,
    by_head: bool,
) -> tuple[Any, Any]:
    """Compute the same in plain PyTorch."""
    features = given.drawn(vectors) if isinstance(given, MapFeatures) else given

    def arranged(x: Tensor) -> Tensor:
        # Raw heads are moved, which are a few times smaller than what becomes of some.
        return x.transpose(1, 2).contiguous().transpose(1, 2) if by_head else x

    phi_q = None if q is None else features.queries(arranged(q).to(dtype), divided).to(dtype)
    phi_k = None if k is None else features.keys(arranged(k).to(dtype)).to(dtype)
    return phi_q, phi_k


_FUNCTION = FusedFunction(
    plain_features,
    Kernels(launch.forward, launch.backward, refuses),
    Kernels(cpu.forward, cpu.backward, cpu.refuses),
)
