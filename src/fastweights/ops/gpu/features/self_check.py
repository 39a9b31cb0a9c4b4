"""May the kernels of feature maps and norms run, and are they right on this GPU?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.features import Features
from fastweights.ops.gpu import device
from fastweights.ops.gpu.features import launch
from fastweights.ops.gpu.self_check import Check, relative_errors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAPS = ("none", "elu", "relu", "silu")
LARGEST_M = 4096


def refuses(tensors: Sequence[Any], settings: Sequence[Any]) -> str | None:
    """Say why the kernels are not for such a call; None where they are."""
    features, _, dtype, by_head = settings
    given = [x for x in tensors[:2] if x is not None]
    for x in given:
        if reason := device.refuses(x, DTYPES, (torch.float32, torch.float64)):
            return reason
        if x.shape[3] > LARGEST_M:
            return f"a head may have up to {LARGEST_M} entries, got {x.shape[3]}"
        if x.numel() == 0 or x.shape[:3].numel() >= 2**31:
            return "heads are counted in 32 bits, and there has to be one"
    description: Features = features.description
    norm = launch.norm_of(description)
    if description.map not in MAPS:
        return f"the kernels map entry by entry, with {', '.join(MAPS)}, not with {description.map!r}"
    if norm != "none" and any(x.shape[3] == 1 for x in given):
        return "a head of one entry is no more than a sign once it is normalised"
    if not description.maps and norm == "none":
        return "there is nothing to compute but a scale"
    if by_head:
        return "features are to stand head by head"
    checks = (check_of(x.dtype, dtype, x.shape[3], description.map, norm).refusal(x.device) for x in given)
    return next(filter(None, checks), None)


@cache
def check_of(dtype: torch.dtype, out: torch.dtype, M: int, name: str, norm: str) -> Check:
    """Return the check of the kernels for heads of this size and dtype through this map and norm."""
    short, short_out = (str(x).removeprefix("torch.") for x in (dtype, out))
    return Check(
        key=f"{short} to {short_out}, M = {M}, {name}, {norm}",
        kernels=f"the kernels of feature maps for {short} to {short_out}, M = {M}, map {name} and norm {norm}",
        source=Path(__file__).parent,
        dtype=out if dtype == torch.float32 else dtype,
        compare=lambda device: compare(
            Features.named(name, sum=norm == "sum", l2=norm == "l2", scale=0.3), dtype, out, device, (2, 75, 3, M)
        ),
    )


def compare(
    features: Features, dtype: torch.dtype, out: torch.dtype, device: torch.device, shape: tuple[int, int, int, int]
) -> dict[str, float]:
    """Return how far features and gradients of queries and keys are from those in float64, relative to their norms."""
    generator = torch.Generator(device).manual_seed(0)
    B, T, H, M = shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    # Parts of what a projection gives; of one sign where they are divided by sums, which could be next to nothing.
    projected = normal(B, T, 2 * H * M + 8)
    parts = (projected.abs() if features.sum else projected).split([H * M, H * M, 8], -1)[:2]
    q, k = (x.unflatten(-1, (H, M)) for x in parts)
    tensors, settings = (q, k, None), (features, False, out, False)
    grads = [normal(*shape).to(out) for _ in range(2)]
    phi = launch.forward(tensors, settings)
    found = launch.backward(grads, tensors, settings)
    exact = [x.double().requires_grad_() for x in (q, k)]
    with torch.enable_grad():
        want = features.apply(exact[0], exact[1], False)
        gradients = torch.autograd.grad(want, exact, [dphi.double() for dphi in grads])
    return relative_errors(("phi_q", "phi_k", "q", "k"), (*phi, *found[:2]), (*want, *gradients))
