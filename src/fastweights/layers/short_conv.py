"""The layer of a short causal convolution: its weights, for `ops.fused.short_convolution`."""

import torch
from torch import Tensor, nn

from fastweights.ops.fused.short_convolution import short_convolution


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
        return short_convolution(x, self.weight, None, recent, mask=mask, cu_seqlens=cu_seqlens, starts=starts)

    def extra_repr(self) -> str:
        """Return what print(layer) shows."""
        return f"channels={self.channels}, taps={self.taps}"
