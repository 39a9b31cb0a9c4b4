"""`FeedForward`, the other half of a Transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from fastweights.layers.checks import check_dropout


class FeedForward(nn.Sequential):
    """Each token by itself: `dropout(W_2 dropout(relu(W_1 x + b_1)) + b_2)`, (..., d_model) -> (..., d_model).

    `inner_dropout` is for the hidden units, if not the same.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0, inner_dropout: float | None = None) -> None:
        if d_ff < 1:
            raise ValueError(f"d_ff must be at least 1, got {d_ff}")
        dropout = check_dropout(dropout)
        inner = dropout if inner_dropout is None else check_dropout(inner_dropout)
        super().__init__(
            nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(inner), nn.Linear(d_ff, d_model), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layers in turn."""
        return super().forward(x)
