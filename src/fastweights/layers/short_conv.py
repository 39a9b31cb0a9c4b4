"""A short causal convolution of each channel by itself, and what it carries from one segment to the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Module):
    """y_t = sum over j < taps of weight[:, j] * x_{t-j}, channel by channel, within one text.

    Args:
        channels: how many there are.
        taps: steps that an output sees, its own included.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        if taps < 2:
            raise ValueError(f"a short convolution sees at least 2 steps, got {taps}")
        self.channels, self.taps = channels, taps
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-(taps**-0.5), taps**-0.5))

    def forward(
        self,
        x: Tensor,
        recent: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve x (B, T, channels), and return y and the last taps - 1 inputs of each sequence.

        `recent` (N, taps - 1, channels) are those of an earlier segment, zeros if None. `mask`, `cu_seqlens` and
        `starts` are those of `fast_weight_memory`.
        """
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        shape = (N, self.taps - 1, self.channels)
        recent = x.new_zeros(shape) if recent is None else recent.to(x.dtype)
        if recent.shape != shape:
            raise ValueError(f"state.recent must have shape {shape} here, got {tuple(recent.shape)}")
        weight = self.weight.to(x.dtype)
        if mask is None and cu_seqlens is None and starts is None:
            longer = torch.cat([recent, x], 1)
            y = F.conv1d(longer.transpose(1, 2), weight.flip(1).unsqueeze(1), groups=self.channels)
            return y.transpose(1, 2), longer[:, -self.taps + 1 :].clone()
        # Every tap reads a row of one table: what is carried in, all inputs, and a row of zeros.
        table = torch.cat([recent.flatten(0, 1), x.flatten(0, 1), x.new_zeros(1, self.channels)])
        taps, ends = self._sources(x, mask, cu_seqlens, starts)
        y = torch.einsum("btjc,cj->btc", table[taps], weight)
        return y, table[ends]

    def _sources(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of the table that taps of tokens read (B, T, taps), and those carried on (N, taps - 1).

        Tokens that count have a place among those of their text, which may begin with what is carried in.
        """
        (B, T, _), device, reach = x.shape, x.device, self.taps - 1
        time = torch.arange(T, device=device)
        counts = torch.ones(B, T, dtype=torch.long, device=device) if mask is None else mask.long()
        if cu_seqlens is None:
            first, sequence = (time == 0).expand(B, T), torch.arange(B, device=device)[:, None].expand(B, T)
            ends = torch.full((B,), T - 1, device=device)
            rows, N = torch.arange(B, device=device), B
            filled = torch.ones(B, dtype=torch.bool, device=device)
        else:
            bounds, N = cu_seqlens.long(), cu_seqlens.numel() - 1
            sequence = (torch.searchsorted(bounds, time, right=True) - 1)[None]
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
        taps = rows_of(row, sequence.expand(B, T), before, own, continues, torch.arange(self.taps, device=device))
        last = [x[rows, ends] for x in (before, own, continues)]
        # A sequence without tokens carries on what it came with.
        before_end, own_end, continues_end = last[0], torch.where(filled, last[1], 0), last[2] | ~filled
        back = torch.arange(reach - 1, -1, -1, device=device)
        carried_on = rows_of(rows, torch.arange(N, device=device), before_end, own_end, continues_end, back)
        return taps, carried_on

    def extra_repr(self) -> str:
        """Shown by print(layer)."""
        return f"channels={self.channels}, taps={self.taps}"
