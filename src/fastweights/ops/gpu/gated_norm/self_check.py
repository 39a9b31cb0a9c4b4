"""May the kernels of the gated norm run, and are they right on this GPU?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.gpu import device
from fastweights.ops.gpu.gated_norm import launch
from fastweights.ops.gpu.self_check import Check, relative_errors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_M = 4096


def refuses(tensors: Sequence[Any], settings: Sequence[Any]) -> str | None:
    """Say why the kernels are not for such a call; None where they are."""
    x, weight, gate = tensors
    if reason := device.refuses(x, DTYPES, (torch.float32, torch.float64)):
        return reason
    if x.shape[3] > LARGEST_M:
        return f"a head may have up to {LARGEST_M} entries, got {x.shape[3]}"
    if x.numel() == 0 or x.shape[:3].numel() >= 2**31:
        return "heads are counted in 32 bits, and there has to be one"
    for other in (weight, gate):
        if other is not None and other.device != x.device:
            return f"x is on {x.device}, another tensor on {other.device}"
    return check_of(x.dtype, x.shape[3], settings[0]).refusal(x.device)


@cache
def check_of(dtype: torch.dtype, M: int, opening: str | None) -> Check:
    """Return the check of the kernels for heads of this size and dtype, and this opening."""
    return Check(
        key=f"{str(dtype).removeprefix('torch.')}, M = {M}, {opening}",
        kernels=f"the kernels of the gated norm for {dtype}, M = {M} and opening {opening!r}",
        source=Path(__file__).parent,
        dtype=dtype,
        compare=lambda device: compare(dtype, opening, device, (2, 75, 3, M)),
    )


def compare(
    dtype: torch.dtype, opening: str | None, device: torch.device, shape: tuple[int, int, int, int]
) -> dict[str, float]:
    """Return how far y and its gradients are from those in float64, relative to their norms."""
    generator = torch.Generator(device).manual_seed(0)
    (B, T, H, M), settings = shape, (opening, 1e-5, 0.3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    # A part of what a projection gives.
    gate = None if opening is None else normal(B, T, H * M + 8)[..., : H * M].unflatten(-1, (H, M))
    tensors, dy = (normal(*shape), normal(M), gate), normal(*shape)
    (y,) = launch.forward(tensors, settings)
    grads = launch.backward((dy,), tensors, settings)
    exact = [t.double().requires_grad_() for t in tensors if t is not None]
    with torch.enable_grad():
        scaled = exact[0] * settings[2]
        want = scaled * (scaled.square().mean(-1, keepdim=True) + settings[1]).rsqrt() * exact[1]
        if opening is not None:
            want = want * exact[2].sigmoid() * (exact[2] if opening == "silu" else 1)
        gradients = torch.autograd.grad(want, exact, dy.double())
    found = [t for t in (y, *grads) if t is not None]
    return relative_errors(("y", "x", "weight", "gate")[: len(found)], found, (want, *gradients))
