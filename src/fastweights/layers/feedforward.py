"""`FeedForward`, the other half of a Transformer block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastweights.common.tables import look_up
from fastweights.layers import feedforward_fused
from fastweights.layers.checks import check_dropout

BACKENDS = ("auto", "fused", "dense")


class FeedForward(nn.Sequential):
    """Each token by itself: `dropout(W_2 dropout(relu(W_1 x + b_1)) + b_2)`, (..., d_model) -> (..., d_model).

    Args:
        d_model, d_ff: sizes of the input and output, and between the two layers.
        dropout: share of the output that is dropped in training.
        inner_dropout: share of the hidden units, if not the same.
        backend: "fused", GPU kernels for bfloat16 that touch memory less; "dense", plain PyTorch; "auto" takes the
            kernels where they can run. They drop other units than PyTorch does with the same seed.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.0,
        inner_dropout: float | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        if d_ff < 1:
            raise ValueError(f"d_ff must be at least 1, got {d_ff}")
        dropout = check_dropout(dropout)
        inner = dropout if inner_dropout is None else check_dropout(inner_dropout)
        look_up(dict.fromkeys(BACKENDS), backend, "backend")
        super().__init__(
            nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(inner), nn.Linear(d_ff, d_model), nn.Dropout(dropout)
        )
        self.d_ff, self.inner_dropout, self.backend = d_ff, inner, backend

    def forward(self, x: Tensor) -> Tensor:
        """The layers in turn."""
        narrow = self._cast(x)
        return self._fused(narrow) if self._can_fuse(narrow) else super().forward(x)

    def _fused(self, x: Tensor) -> Tensor:
        first, second = self[0], self[3]
        weights = (first.weight.to(x.dtype), first.bias, second.weight.to(x.dtype))
        p = self.inner_dropout if self.training else 0.0
        # Evaluation leaves the random generator alone.
        seed = feedforward_fused.new_seed(x.device) if p else torch.zeros(2, dtype=torch.int64, device=x.device)
        y, _ = feedforward_fused.fused_feedforward(x.reshape(-1, x.shape[-1]), *weights, seed, p, False)
        return self[4](y.view(x.shape) + second.bias.to(x.dtype))

    def _can_fuse(self, x: Tensor) -> bool:
        if self.backend == "dense" or (self.backend == "auto" and not x.is_cuda):
            return False
        reason = feedforward_fused.refuses(x, self.d_ff, self.inner_dropout if self.training else 0.0)
        if reason is not None and self.backend == "fused":
            raise ValueError(f"FeedForward.backend is 'fused', but {reason}")
        return reason is None

    def _cast(self, x: Tensor) -> Tensor:
        """In the dtype of autocast, as the input of any matrix product."""
        device = x.device.type
        narrow = torch.is_autocast_enabled(device) and x.dtype != torch.float64
        return x.to(torch.get_autocast_dtype(device)) if narrow else x
