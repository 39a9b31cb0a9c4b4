"""`FeedForward`, the other half of a Transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from fastweights.layers.checks import check_dropout


class FeedForward(nn.Sequential):
    """Each token by itself: `dropout(W_2 dropout(relu(W_1 x + b_1)) + b_2)`, (..., d_model) -> (..., d_model)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        if d_ff < 1:
            raise ValueError(f"d_ff must be at least 1, got {d_ff}")
        dropout = check_dropout(dropout)
        super().__init__(
            nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layers in turn."""
        return super().forward(x)
