"""May the kernels of linear attention run, and are they right on this GPU?"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fastweights.ops.features import PLAIN, Drawn, Features, MapFeatures
from fastweights.ops.gpu import device
from fastweights.ops.gpu.linear_attention import launch
from fastweights.ops.gpu.linear_attention.launch import Call, Inputs
from fastweights.ops.gpu.self_check import Check, relative_errors

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
LARGEST_D, LARGEST_M = 512, 128
# DPFP and FAVOR+ take whole heads at once.
LARGEST_HEAD_MAPPED = 128
MAPS = ("none", "elu", "relu", "dpfp", "favor")


def why_unfused(features: Features, R: int, normalized: bool) -> str | None:
    """Say why the map of heads of size R has to be computed before the kernels run; None where it need not."""
    if features.map not in MAPS or features.sum or features.l2 or features.scale != 1:
        return "the kernels of linear attention do not know this feature map or normalisation"
    if features.map in launch.WHOLE and R > LARGEST_HEAD_MAPPED:
        return f"the kernels of linear attention map heads of up to {LARGEST_HEAD_MAPPED} by {features.map}, not of {R}"
    if features.m and not normalized:
        return "the kernels of linear attention scale FAVOR+ of queries so that it cannot overflow"
    return None


def refuses(inputs: Inputs, features: Features, normalized: bool) -> str | None:
    """Say why the kernels are not for a call with these q, k, v, mask and vectors; None if they are."""
    q, k, v, mask, vectors = inputs
    if reason := _refuses(q, (k, v, mask), vectors, v.shape[3], features, normalized):
        return reason
    (B, T, H, _), S = q.shape, k.shape[1]
    if B * H * max(T, S) >= 2**31:
        return f"{B * H} heads of {max(T, S)} tokens are more than can be numbered"
    if torch.compiler.is_compiling():
        # There are no numbers to check with; the custom op checks when it first runs.
        return None
    return unproven(Call.of(q, k, v, mask, features, normalized), H, q.device)


def refuses_writing(
    k: Tensor, v: Tensor, mask: Tensor | None, vectors: Tensor | None, features: Features, normalized: bool
) -> str | None:
    """Say why the kernels are not for writing a state with these keys and values."""
    if reason := _refuses(k, (v, mask), vectors, v.shape[3], features, normalized):
        return reason
    if k.dtype != v.dtype or k.shape[:3] != v.shape[:3]:
        return "keys and values do not go together"
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        return "the mask is not bool of shape (B, S)"
    return unproven(Call.of_state(k, v.shape[3], mask, features, normalized), k.shape[2], k.device)


def refuses_reading(q: Tensor, W: Tensor, z: Tensor | None, vectors: Tensor | None, features: Features) -> str | None:
    """Say why the kernels are not for reading a state W (B, H, D, M), z (B, H, D) with these queries."""
    (B, _, H, R), M = q.shape, W.shape[-1]
    if reason := _refuses(q, (W, z), vectors, M, features, z is not None):
        return reason
    wide = torch.promote_types(q.dtype, torch.float32)
    if W.dtype != wide or (z is not None and z.dtype != wide):
        return f"the kernels read a state of {wide} with queries of {q.dtype}, got W in {W.dtype}"
    if W.shape[:3] != (B, H, features.size(R)) or (z is not None and z.shape != W.shape[:3]):
        return "queries and state do not go together"
    call = Call.of_state(q, M, None, features, z is not None, reads=True)
    return unproven(call, H, q.device)


def _refuses(
    x: Tensor,
    others: tuple[Tensor | None, ...],
    vectors: Tensor | None,
    M: int,
    features: Features,
    normalized: bool,
) -> str | None:
    """Say why the kernels are not for queries or keys x (B, T, H, R) beside these other tensors."""
    if reason := device.refuses(x, DTYPES, (torch.float32, torch.float64)):
        return reason
    R = x.shape[3]
    if reason := why_unfused(features, R, normalized):
        return reason
    D = features.size(R)
    if D > LARGEST_D or M > LARGEST_M:
        limits = f"phi may have up to {LARGEST_D} and values up to {LARGEST_M} features"
        return f"{limits}, got D = {D} and M = {M}"
    if features.m and (vectors is None or vectors.shape != (features.m, R)):
        return f"the random vectors of FAVOR+ are not for heads of {R}"
    for other in (x, *others, vectors):
        if other is not None and other.numel() == 0:
            return "there is nothing to compute"
        if other is not None and other.device != x.device:
            return f"queries or keys are on {x.device}, another tensor on {other.device}"
    return None


def unproven(call: Call, H: int, device: torch.device) -> str | None:
    """Say why the kernels of such a call must not be used."""
    return check_of(call, H).refusal(device)


@cache
def check_of(call: Call, H: int) -> Check:
    """Return the check of such a call; H heads are what it is run with, and its verdict is for any number."""
    what = f"{str(call.dtype)[6:]}, {call.features.describe(call.R)}, M = {call.M}, by {call.way}, tiles of {call.C}"
    how = f"normalized {call.normalized}, masked {call.masked}"
    return Check(
        key=f"{what}, {how}",
        kernels=f"the kernels of linear attention for {what}",
        # Maps and products are the memory's.
        source=Path(__file__).parents[1],
        dtype=call.dtype,
        compare=lambda device: compare(call, H, device),
    )


def compare(
    call: Call, H: int, device: torch.device, tokens: tuple[int, int] | None = None, mean: float = 1.0
) -> dict[str, float]:
    """Return how far output and gradients are from those in float64, relative to their norms.

    `tokens` are T and S, if not as many as take every path. Values have a mean.
    """
    few = call.way == launch.WEIGHTS
    T, S = tokens or ((call.C - 3, call.C - 1) if few else (9 * call.C - 5, 9 * call.C + 7))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k = (normal(3, n, H, call.R) for n in (T, S))
    if call.features == PLAIN:
        q, k = q.abs(), k.abs()
    q, k, v, dy = (x.to(call.dtype) for x in (q, k, normal(3, S, H, call.M) + mean, normal(3, T, H, call.M)))
    lengths = torch.tensor([[S], [S // 3], [0]], device=device)
    mask = torch.arange(S, device=device) < lengths if call.masked else None
    phi: Features | MapFeatures = call.features
    vectors = None
    if call.features.m:
        vectors = normal(call.features.m, call.R).to(torch.promote_types(call.dtype, torch.float32))
        vectors *= call.features.inner
        phi = MapFeatures(Drawn(vectors, call.features.inner))
    exact = q_, k_, v_ = tuple(x.double().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        want = weighted(q_, k_, v_, mask, phi, call.normalized)
    if call.way == launch.KEPT:
        writes = call._replace(C=launch.tile_width(call.dtype, call.features.size(call.R), call.M))
        W, z = launch.write(writes, k, v, mask, vectors)
        y = launch.read(call._replace(C=launch.QUERIES), q, vectors, W, z if call.normalized else None)
        return relative_errors(("y",), (y,), (want,))
    y, *kept = launch.forward(call, (q, k, v, mask, vectors))
    found = launch.backward(call, dy, (q, k, v, mask, vectors), kept)
    return relative_errors(("y", "q", "k", "v"), (y, *found), (want, *torch.autograd.grad(want, exact, dy.double())))


def weighted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    features: Features | MapFeatures,
    normalized: bool,
) -> Tensor:
    """Compute linear attention from all weights."""
    q, k = features.queries(q, normalized), features.keys(k)
    weights = torch.einsum("bthd,bshd->bhts", q, k)
    if mask is not None:
        weights = weights * mask[:, None, None]
    if normalized:
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.masked_fill(total == 0, 1)
    return torch.einsum("bhts,bshm->bthm", weights, v)
