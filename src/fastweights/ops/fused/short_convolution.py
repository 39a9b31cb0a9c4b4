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
    """Return the rows of the table that taps of tokens read (B, T, taps), and those carried on (N, taps - 1).

    Tokens that count have a place among those of their text, which may begin with what is carried in.
    """
    reach, time = n_taps - 1, torch.arange(T, device=device)
    counts = torch.ones(B, T, dtype=torch.long, device=device) if mask is None else mask.long()
    if cu_seqlens is None:
        first, sequence = (time == 0).expand(B, T), torch.arange(B, device=device)[:, None].expand(B, T)
        ends = torch.full((B,), T - 1, device=device)
        rows, N = torch.arange(B, device=device), B
        filled = torch.ones(B, dtype=torch.bool, device=device)
    else:
        bounds, N = cu_seqlens.long(), cu_seqlens.numel() - 1
        sequence = (torch.searchsorted(bounds, time, right=True) - 1).clamp(max=N - 1)[None]
        first = bounds[sequence] == time
        ends, filled = (bounds[1:] - 1).clamp(min=0), bounds.diff() > 0
        rows = torch.zeros(N, dtype=torch.long, device=device)
    begins = first if starts is None else first | starts
    seen = counts.cumsum(1)
    # How many tokens of its row count before a token's text, and how many of its text up to the token.
    before = torch.where(begins, seen - counts, 0).cummax(1).values
    own = seen - before
    continues = torch.ones_like(begins)
    if starts is not None:
        last_start, last_first = (torch.where(at, time + 1, 0).cummax(1).values for at in (starts, first))
        continues = last_start < last_first
    # The token that is the i-th of those of its row that count.
    place = torch.full((B, T + 1), T, device=device)
    place.scatter_(1, torch.where(counts > 0, seen - 1, T), time.expand(B, T).contiguous())

    def rows_of(row: Tensor, n: Tensor, before: Tensor, own: Tensor, continues: Tensor, back: Tensor) -> Tensor:
        """Return the table's rows of the tokens `back` before the last of `own` ones."""
        wanted = own.unsqueeze(-1) - 1 - back
        token = place[row.unsqueeze(-1), (before.unsqueeze(-1) + wanted).clamp(min=0)]
        carried = n.unsqueeze(-1) * reach + reach + wanted
        carried = torch.where(continues.unsqueeze(-1) & (wanted >= -reach), carried, N * reach + B * T)
        return torch.where(wanted >= 0, N * reach + row.unsqueeze(-1) * T + token, carried)

    row = torch.arange(B, device=device)[:, None].expand(B, T)
    taps = rows_of(row, sequence.expand(B, T), before, own, continues, torch.arange(n_taps, device=device))
    last = [x[rows, ends] for x in (before, own, continues)]
    # A sequence without tokens carries on what it came with.
    before_end, own_end, continues_end = last[0], torch.where(filled, last[1], 0), last[2] | ~filled
    back = torch.arange(reach - 1, -1, -1, device=device)
    carried_on = rows_of(rows, torch.arange(N, device=device), before_end, own_end, continues_end, back)
    return taps, carried_on


_FUNCTION = FusedFunction(
    plain_convolution,
    Kernels(launch.forward, launch.backward, refuses),
    Kernels(cpu.forward, cpu.backward, cpu.refuses),
)
