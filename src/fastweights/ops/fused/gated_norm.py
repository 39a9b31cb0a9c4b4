"""What is read from a memory, divided by its root mean square and gated: in PyTorch, in C++, and in GPU kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.common.tables import look_up
from fastweights.ops.cpu import gated_norm as cpu
from fastweights.ops.fused.function import FusedFunction, Kernels
from fastweights.ops.gpu.gated_norm import launch
from fastweights.ops.gpu.gated_norm.self_check import refuses

OPENINGS: dict[str | None, Callable[[Tensor], Tensor] | None] = {None: None, "silu": F.silu, "sigmoid": torch.sigmoid}


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None = None,
    opening: str | None = None,
    eps: float = 1e-5,
    scale: float = 1.0,
) -> Tensor:
    """Compute rms_norm(scale x) weight opening(gate), head by head, in the dtype of x.

    Args:
        x: (B, T, H, M).
        weight: (M,).
        gate: (B, T, H, M), for an `opening` of "silu" or "sigmoid"; None without one.
        opening: what the gate goes through.
        eps: added to the mean square.
        scale: factor on x.
    """
    if opening not in OPENINGS:
        look_up({str(name): None for name in OPENINGS}, opening, "opening")
    if x.dim() != 4 or weight.shape != x.shape[3:] or (gate is None) != (opening is None):
        given = None if gate is None else tuple(gate.shape)
        raise ValueError(
            f"x must have shape (B, T, H, M), weight (M,) and gate that of x, or None without an opening; got "
            f"{tuple(x.shape)}, {tuple(weight.shape)}, {given} and opening {opening!r}"
        )
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gate must have the shape of x, {tuple(x.shape)}, got {tuple(gate.shape)}")
    (y,) = _FUNCTION((x, weight, gate), opening, eps, scale)
    return y


def plain_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None, opening: str | None, eps: float, scale: float
) -> tuple[Tensor]:
    """Compute the same in plain PyTorch."""
    wide, opens = torch.promote_types(x.dtype, torch.float32), OPENINGS[opening]
    y = F.rms_norm(x.to(wide) * scale, weight.shape, weight.to(wide), eps).to(x.dtype)
    return (y if opens is None or gate is None else y * opens(gate),)


_FUNCTION = FusedFunction(
    plain_norm,
    Kernels(launch.forward, launch.backward, refuses),
    Kernels(cpu.forward, cpu.backward, cpu.refuses),
)
