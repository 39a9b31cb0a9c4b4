"""`FeedForward`, the other half of a Transformer block."""

from typing import Any

from torch import Tensor, nn

from fastweights.layers.checks import check_dropout, check_dtype
from fastweights.layers.fusing import check_backend, in_autocast_dtype, takes_kernels
from fastweights.layers.linear import Linear
from fastweights.ops.fused.linear import linear
from fastweights.ops.gpu.feedforward.operators import fused_feedforward
from fastweights.ops.gpu.feedforward.self_check import refuses


class FeedForward(nn.Sequential):
    """Each token by itself: `dropout(W_2 dropout(relu(W_1 x + b_1)) + b_2)`, (..., d_model) -> (..., d_model).

    Args:
        d_model, d_ff: sizes of the input and output, and between the two layers.
        dropout: share of the output that is dropped in training.
        inner_dropout: share of the hidden units, if not the same.
        backend: "fused", GPU kernels for bfloat16 that touch memory less; "dense", plain PyTorch; "auto" takes the
            kernels where they can run, which is not under `torch.func`, `vmap` or forward-mode derivatives. They drop
            other units than PyTorch does with the same seed.
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
        super().__init__(
            Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(inner), Linear(d_ff, d_model), nn.Dropout(dropout)
        )
        self.d_ff, self.inner_dropout, self.backend = d_ff, inner, check_backend(backend)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers in turn, or the kernels in their place."""
        check_dtype(x, self[0])
        narrow, p = in_autocast_dtype(x), self.inner_dropout if self.training else 0.0
        changed = self._changed()
        wide: Any = self[0]
        if takes_kernels(self, narrow, lambda: changed or refuses(narrow, self.d_ff, p)):
            second: Any = self[3]
            dtype = narrow.dtype
            weights = (wide.weight.to(dtype), wide.bias, second.weight.to(dtype))
            y = fused_feedforward(narrow.reshape(-1, narrow.shape[-1]), *weights, p)
            return self[4](y.view(x.shape) + second.bias.to(dtype))
        if changed:
            return super().forward(x)
        x = linear(x, wide.weight, wide.bias, relu=True)
        for layer in list(self)[2:]:
            x = layer(x)
        return x

    def _changed(self) -> str | None:
        """Say why the layers have to be called one by one; None where one function may stand for several."""
        if [type(layer) for layer in self] != _LAYERS or any("forward" in vars(layer) for layer in self):
            return "one of its layers was replaced"
        for layer in self:
            if layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks:
                return "one of its layers has hooks"
        return None


_LAYERS = [Linear, nn.ReLU, nn.Dropout, Linear, nn.Dropout]
