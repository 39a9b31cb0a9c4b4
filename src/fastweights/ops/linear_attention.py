"""Linear attention without a direction of time, for encoders and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.cpu import linear_attention as cpu
from fastweights.ops.cpu.features import unknown
from fastweights.ops.eager import is_eager, wants_gradients
from fastweights.ops.features import PLAIN, Features, MapFeatures
from fastweights.ops.fused.features import map_heads, vectors_of
from fastweights.ops.fused.function import FusedFunction, Kernels
from fastweights.ops.gpu.linear_attention import launch
from fastweights.ops.gpu.linear_attention.operators import attention, eager_backward, eager_forward
from fastweights.ops.gpu.linear_attention.self_check import refuses, refuses_reading, refuses_writing, why_unfused
from fastweights.ops.memory import check_features
from fastweights.ops.normalization import divides, safe_divide
from fastweights.ops.state import FastWeightState

# The most keys that are multiplied in float32 at least.
_FEW = 32


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    normalization: str | None = "attention",
    features: Features | MapFeatures = PLAIN,
) -> Tensor:
    """Every query reads the memory of all keys and values: Eq. 14 with the sums over the whole sequence.

    Equivalent to

        weights = einsum("bihd, bjhd -> bhij", q, k)
        y = einsum("bhij, bjhm -> bihm", weights / weights.sum(-1, keepdim=True), v)

    in whichever order takes fewer products: (q k) v for few keys, q (k v), which is O(T), for many. On a GPU it is one
    launch up to 512 tokens, with feature map, mask and division inside; on a CPU it is one pass in C++.

    Args:
        q: queries (B, T, H, D), already mapped by phi.
        k: keys (B, S, H, D), mapped by phi; S may differ from T.
        v: values (B, S, H, M).
        mask: (B, S), False for keys that are padding.
        normalization: "attention", or None for the plain sum over v ⊗ k.
        features: what q and k still have to go through, as in `fast_weight_memory`: with `Features.named("elu")` they
            come as raw heads.

    Returns:
        y (B, T, H, M), 0 where no key is left or none has anything in common with the query.
    """
    _check(q, k, v, mask)
    normalized = divides(normalization)
    with torch.autocast(q.device.type, enabled=False):
        if _maps_first(q, features, normalized):
            q, k = _queries(q, features, normalized), _keys(k, mask, features)
            features = PLAIN
        phi, tensors = features.description, (q, k, v, mask, vectors_of(features))
        if torch.compiler.is_compiling() and _refuses(tensors, (features, normalized)) is None:
            return attention(*tensors, phi.map, phi.nu, phi.m, phi.inner, normalized)[0]
        return _FUSED(tensors, features, normalized)[0]


def _maps_first(x: Tensor, features: Features | MapFeatures, normalized: bool) -> bool:
    """Return whether heads have to be mapped before any kernels see them; refuse heads that the map is not made for."""
    check_features(features)
    features.size(x.shape[3])
    if x.device.type == "cpu":
        return unknown(features) is not None
    return why_unfused(features.description, x.shape[3], normalized) is not None


def _refuses(tensors: Sequence[Any], settings: Sequence[Any]) -> str | None:
    features, normalized = settings
    return refuses(tensors, features.description, normalized)


def _queries(q: Tensor, features: Features | MapFeatures, divided: bool) -> Tensor:
    """Map queries (B, T, H, R): (B, T, H, D), the tokens of a head one after another, as products want them."""
    if features == PLAIN:
        return q
    return map_heads(q, None, features, divided=divided, dtype=q.dtype, by_head=True)[0]


def _keys(k: Tensor, mask: Tensor | None, features: Features | MapFeatures) -> Tensor:
    """Map keys (B, S, H, R): (B, S, H, D), whatever padding is."""
    if features == PLAIN:
        return k
    if mask is not None:
        # A map of NaN has no gradient of 0.
        k = k.masked_fill(~mask[..., None, None], 0)
    return map_heads(None, k, features, divided=False, dtype=k.dtype, by_head=True)[1]


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    vectors: Tensor | None,
    given: Features | MapFeatures,
    normalized: bool,
) -> tuple[Tensor]:
    """Compute y in plain PyTorch."""
    features = given.drawn(vectors) if isinstance(given, MapFeatures) else given
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k = _queries(q, features, normalized), _keys(k, mask, features)
        if mask is not None:
            k, v = (x.masked_fill(~mask[..., None, None], 0) for x in (k, v))
        # Sums of products, not divided yet, may be more than float16 holds; for a few keys wide products cost nothing.
        exact = dtype == torch.float16 or k.shape[1] <= _FEW
        Q, K, V = (x.to(wide if exact else dtype).transpose(1, 2) for x in (q, k, v))
        if not normalized:
            return (_product(Q, K, V).transpose(1, 2).to(dtype),)
        # The sums of the weights, from wide numbers: what is rounded here is rounded for all keys alike.
        total = Q.to(wide) @ K.sum(-2, dtype=wide).unsqueeze(-1)
        if V.element_size() > 2:
            return (safe_divide(_product(Q, K, V), total).transpose(1, 2).to(dtype),)
        # The gradient of a query is the difference of W g and z (g·y), and 16 bits of each leave little of it where
        # values are nearly the same. As weights sum to 1, what is left out is added again to y, and no gradient goes
        # through it. Wider products keep enough, and the digits of small values beside a large one.
        rest, common = _without_mean(V, None if mask is None else mask[:, None, :, None])
        # As `safe_divide` has it, in fewer steps.
        empty = total.abs() < torch.finfo(wide).tiny ** 0.5
        y = _product(Q, K, rest) / total.masked_fill(empty, torch.inf) + common
        return (y.masked_fill(empty, 0).transpose(1, 2).to(dtype),)


_FUSED = FusedFunction(
    _plain,
    Kernels(eager_forward, eager_backward, _refuses),
    Kernels(cpu.forward, cpu.backward, cpu.refuses),
    outputs=1,
)


def _without_mean(V: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """V (B, H, S, M), 0 where masked, without most of what its rows have in common; and that (B, H, 1, M), wide."""
    wide = torch.promote_types(V.dtype, torch.float32)
    x = V.detach().to(wide)
    count = x.new_full((), x.shape[2]) if mask is None else mask.sum(2, keepdim=True).clamp(min=1)
    total, squares = x.sum(2, keepdim=True), x.square()
    # A mean that is one value's would cost the others their digits; normal numbers hardly ever stand out so far. Of a
    # few values one always does.
    share = (_FEW / count).clamp(max=0.75).masked_fill(count <= 4, 1)
    stands_out = squares.amax(2, keepdim=True) > share * squares.sum(2, keepdim=True)
    rest = V - (total / count).masked_fill(stands_out, 0).to(V.dtype)
    if mask is not None:
        rest = rest.masked_fill(~mask, 0)
    # Numbers of 16 bits less one number are all rounded the same way: what was taken from them is measured.
    return rest, (total - rest.detach().sum(2, keepdim=True, dtype=wide)) / count


def _product(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Q K^T V (B, H, T, M)."""
    T, (S, D), M = Q.shape[-2], K.shape[-2:], V.shape[-1]
    return (Q @ K.mT) @ V if T * S * (D + M) <= (T + S) * D * M else Q @ (K.mT @ V)


def write_memory(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    normalization: str | None = "attention",
    features: Features | MapFeatures = PLAIN,
) -> FastWeightState:
    """The memory of all keys (B, S, H, D), mapped by phi, and values (B, S, H, M) at once: Eqs. 17-18 after S steps.

    Equivalent to

        W, z = einsum("bshd, bshm -> bhdm", k, v), k.sum(1)             # no z without normalization

    in float32 at least: the gradient of a query is the difference of W g and z (g·y), which are nearly the same where
    values have much in common, and 16 bits of each leave nothing of it. A sentence is written once; `read_memory` then
    costs the same however long it was. `features` as in `linear_attention`.
    """
    normalized = divides(normalization)
    with torch.autocast(k.device.type, enabled=False):
        if _maps_first(k, features, normalized):
            k, features = _keys(k, mask, features), PLAIN
        if is_eager(k, v, mask) and not wants_gradients(k, v):
            phi, vectors, M = features.description, vectors_of(features), v.shape[3]
            if refuses_writing(k, v, mask, vectors, phi, normalized) is None:
                W, z = launch.write(launch.Call.of_state(k, M, mask, phi, normalized), k, v, mask, vectors)
                return FastWeightState(W, z if normalized else None)
            if cpu.refuses((k, k, v, mask, None), (features, normalized)) is None:
                W, z = cpu.write(k, v, mask, vectors, features, normalized)
                return FastWeightState(W, z if normalized else None)
        k = _keys(k, mask, features)
        if mask is not None:
            k, v = (x.masked_fill(~mask[..., None, None], 0) for x in (k, v))
        wide = torch.promote_types(k.dtype, torch.float32)
        K, V = (x.to(wide).transpose(1, 2) for x in (k, v))
        return FastWeightState(K.mT @ V, K.sum(-2) if normalized else None)


def read_memory(q: Tensor, state: FastWeightState, *, features: Features | MapFeatures = PLAIN) -> Tensor:
    """What queries (B, T, H, D), mapped by phi, find in a memory that they leave as it is: Eq. 19, (B, T, H, M)."""
    W, z = state.W, state.z
    if W.shape[:3] != (q.shape[0], q.shape[2], features.size(q.shape[3])):
        raise ValueError(f"state.W must be (B, H, D, M) of q {tuple(q.shape)} after its map, got {tuple(W.shape)}")
    normalized = z is not None
    with torch.autocast(q.device.type, enabled=False):
        if _maps_first(q, features, normalized):
            q, features = _queries(q, features, normalized), PLAIN
        if is_eager(q, W, z) and not wants_gradients(q, W, z):
            phi, vectors = features.description, vectors_of(features)
            if refuses_reading(q, W, z, vectors, phi) is None:
                call = launch.Call.of_state(q, W.shape[3], None, phi, normalized, reads=True)
                return launch.read(call, q, vectors, W, z)
            if cpu.refuses_reading(q, W, z, features) is None:
                return cpu.read(q, vectors, W, z, features)
        Q = _queries(q, features, normalized).to(W.dtype).transpose(1, 2)
        y = Q @ W
        if z is not None:
            y = safe_divide(y, Q @ z.unsqueeze(-1))
        return y.transpose(1, 2).to(q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q must be (B, T, H, D), k (B, S, H, D) and v (B, S, H, M), got {given}")
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(f"k must agree with q in all but its length, got {given}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v must agree with k in all but its last size, got {given}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}; cast one of them")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        wanted = f"bool of shape (B, S) = {tuple(k.shape[:2])}"
        raise ValueError(f"mask must be {wanted}, True for keys that count, got {mask.dtype} {tuple(mask.shape)}")
