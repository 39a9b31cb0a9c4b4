"""A linear layer, with ReLU if asked: in plain PyTorch and, for float32 on some processors, by oneDNN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.cpu import products
from fastweights.ops.fused.function import FusedFunction, Kernels, Tensors


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Compute x W^T + b for x (..., K), weight (M, K) and bias (M,), and max(0, that) with `relu`."""
    # Small products have no time to lose, and a compiler must not look at sizes.
    if torch.compiler.is_compiling() or not products.pays(x.numel() // max(1, weight.shape[1]), *weight.shape):
        return plain_linear(x, weight, bias, relu)[0]
    return _FUNCTION((x, weight, bias), relu)[0]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> tuple[Tensor]:
    """Compute the same in plain PyTorch."""
    y = F.linear(x, weight, bias)
    return (y.relu() if relu else y,)


def _refuses(tensors: Tensors, settings: Tensors) -> str | None:
    x, weight, bias = tensors
    if x.shape[-1] != weight.shape[1]:
        return "the sizes do not fit"
    return products.refuses(x.numel() // x.shape[-1], weight.shape[0], x, weight, bias)


def _forward(tensors: Tensors, settings: Tensors) -> tuple[Tensor, ...]:
    x, weight, bias = tensors
    y = products.product(x.reshape(-1, x.shape[-1]), weight, bias, *settings).view(*x.shape[:-1], -1)
    return (y, y) if settings[0] else (y,)


def _backward(grads: Tensors, tensors: Tensors, settings: Tensors, kept: Tensors) -> Tensors:
    x, weight, bias = tensors
    dy = grads[0]
    if settings[0]:
        # Where ReLU gave 0 nothing comes back.
        dy = torch.ops.aten.threshold_backward(dy, kept[0], 0)
    dy = dy.reshape(-1, dy.shape[-1])
    # The first two are products as long as the layer's own, and layers may be frozen.
    dx = products.product(dy, weight.mT).view(x.shape) if x.requires_grad else None
    dweight = products.outer_product(dy, x.reshape(-1, x.shape[-1])) if weight.requires_grad else None
    return dx, dweight, None if bias is None else dy.sum(0)


def _keeps(wanted: Sequence[bool], settings: Tensors) -> tuple[bool, bool, bool]:
    """Keep of x and weight, as `nn.Linear` does, what the gradient of the other needs.

    Where ReLU gives 0 depends on all three, if gradients are differentiated again.
    """
    x, weight, _ = wanted
    (relu,) = settings
    return weight or relu, x or relu, relu


_FUNCTION = FusedFunction(plain_linear, Kernels(_forward, _backward, _refuses), outputs=1, keeps=_keeps)
