"""A short causal convolution of each channel by itself: in plain PyTorch, in C++ on the CPU, and in GPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.cpu import short_convolution as cpu
from fastweights.ops.fused.function import FusedFunction, Kernels
from fastweights.ops.gpu.short_convolution import launch
from fastweights.ops.gpu.short_convolution.self_check import refuses
from fastweights.ops.memory import check_marks, check_packing


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recent: Tensor | None = None,
    *,
    silu: bool = False,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute y_t = bias + sum over j < taps of weight[:, j] * x_{t-j}, channel by channel, within one text.

    Args:
        x: (B, T, C).
        weight: (C, taps), of at least 2 taps. The first weighs the input itself, the last the oldest one; for weights
            of `torch.nn.Conv1d`, in which time runs the other way, give `conv.weight.squeeze(1).flip(1)`.
        bias: (C,).
        recent: (N, taps - 1, C), the last inputs of an earlier segment of each sequence; zeros if None.
        silu: whether y goes through SiLU.
        mask: (B, T), False for padding, which is left out: y is 0 there.
        cu_seqlens: bounds (N + 1,) of N sequences packed along T with B = 1; y is 0 after the last. They rise from 0 to
            T or less: on a GPU nobody looks.
        starts: (B, T), True where a new text begins, which sees no input before that.

    Returns:
        y (B, T, C) and the last taps - 1 inputs of each sequence, both in the dtype of x.
    """
    _check(x, weight, bias)
    check_marks("mask", mask, x, "True for tokens that count")
    check_marks("starts", starts, x, "True where a new text begins")
    check_packing(x, cu_seqlens)
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    shape = (N, weight.shape[1] - 1, x.shape[2])
    if recent is not None and recent.shape != shape:
        raise ValueError(f"recent must have shape (N, taps - 1, C) = {shape} here, got {tuple(recent.shape)}")
    recent = recent if recent is None or recent.dtype == x.dtype else recent.to(x.dtype)
    y, recent = _FUNCTION((x, weight, bias, recent, mask, cu_seqlens, starts), silu)
    return y, recent


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must have shape (B, T, C), got {tuple(x.shape)}")
    C = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != C or weight.shape[1] < 2:
        raise ValueError(f"weight must have shape (C, taps) = ({C}, 2 or more), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != (C,):
        raise ValueError(f"bias must have shape (C,) = ({C},), got {tuple(bias.shape)}")


def plain_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recent: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the same in plain PyTorch."""
    (B, T, C), taps = x.shape, weight.shape[1]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    recent = x.new_zeros(N, taps - 1, C) if recent is None else recent
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if cu_seqlens is not None:
        inside = (torch.arange(T, device=x.device) < cu_seqlens[-1]).expand(B, T)
        mask = inside if mask is None else mask & inside
    with torch.autocast(x.device.type, enabled=False):
        if mask is None and cu_seqlens is None and starts is None:
            longer = torch.cat([recent, x], 1)
            y = F.conv1d(longer.transpose(1, 2), weight.flip(1).unsqueeze(1), bias, groups=C).transpose(1, 2)
            recent = longer[:, T:].clone()
        else:
            # Every tap reads a row of one table: what is carried in, all inputs, and a row of zeros.
            table = torch.cat([recent.flatten(0, 1), x.flatten(0, 1), x.new_zeros(1, C)])
            sources, carried = _sources(B, T, taps, mask, cu_seqlens, starts, x.device)
            y, recent = torch.einsum("btjc,cj->btc", table[sources], weight), table[carried]
            y = y if bias is None else y + bias
        y = F.silu(y) if silu else y
    return y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0), recent


def _sources(
    B: int,
    T: int,
    n_taps: int,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the rows of the table that taps of tokens read (B, T, taps), and those carried on (N, taps - 1)."""
    reach, tokens = n_taps - 1, torch.arange(B * T, device=device)
    bounds = T * torch.arange(B + 1, device=device) if cu_seqlens is None else cu_seqlens.long()
    N = len(bounds) - 1
    carried = torch.arange(N * reach, device=device)
    # All rows but that of zeros, sequence by sequence: what it begins with, then its tokens.
    sequence = torch.searchsorted(bounds, tokens, right=True) - 1
    order = torch.cat([carried // reach, sequence]).argsort(stable=True)
    counts = torch.cat([carried >= 0, (tokens >= 0) if mask is None else mask.flatten()])[order]
    begins = torch.cat([carried % reach == 0, (tokens < 0) if starts is None else starts.flatten()])[order]
    text, seen = begins.cumsum(0), counts.cumsum(0)
    # Where the i-th row that counts stands in this order.
    places = torch.arange(len(order), device=device)
    place = torch.zeros(len(order) + 1, dtype=torch.long, device=device)
    place.scatter_(0, torch.where(counts, seen - 1, len(order)), places)

    def rows_before(at: Tensor, back: Tensor) -> Tensor:
        """Return the rows that count `back` before the last at a place, or that of zeros where another text begins."""
        found = place[(seen[at].unsqueeze(-1) - 1 - back).clamp(min=0)]
        return torch.where(text[found] == text[at].unsqueeze(-1), order[found], len(order))

    at_tokens = torch.empty_like(order).scatter_(0, order, places)[N * reach :]
    taps = rows_before(at_tokens, torch.arange(n_taps, device=device)).view(B, T, n_taps)
    last = bounds[1:] + reach * torch.arange(1, N + 1, device=device) - 1
    return taps, rows_before(last, torch.arange(reach - 1, -1, -1, device=device))


_FUNCTION = FusedFunction(
    plain_convolution,
    Kernels(launch.forward, launch.backward, refuses),
    Kernels(cpu.forward, cpu.backward, cpu.refuses),
)
