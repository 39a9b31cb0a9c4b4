"""Matrix products in float32 on the CPU, by oneDNN where that is faster than what PyTorch takes.

PyTorch multiplies float32 by MKL, which uses AVX-512 on Intel's processors alone. oneDNN, which is part of PyTorch as
well, uses it wherever the processor has it, and is twice as fast on AMD's.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

# oneDNN generates code for every new shape, in half a millisecond. Lengths that change from batch to batch are seldom
# multiples of this many tokens, those of segments are.
TOKENS = 64
# Fewer multiplications are over before oneDNN has begun.
FEWEST = 2**22
# With this many, a product gains more than generating its code takes, even if its shape never comes again.
FEWEST_ONCE = 2**26
# A model that generates text multiplies at most this many tokens at a time, by matrices of the same shapes. They have
# to be read from memory, which oneDNN does faster than MKL.
FEW_TOKENS, FEWEST_OF_FEW = 8, 2**20


@cache
def unavailable() -> str | None:
    """Return why oneDNN is of no use on this machine; None where it is."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this PyTorch does not offer oneDNN's linear layer"
    level = torch.backends.cpu.get_cpu_capability()
    return None if level.startswith("AVX512") else f"it is faster with AVX-512 only, PyTorch uses {level} here"


def pays(tokens: int, columns: int, inner: int) -> bool:
    """Return whether a product of this size is faster by oneDNN."""
    repeated = FEWEST_ONCE if tokens % TOKENS else FEWEST
    return tokens * columns * inner >= (FEWEST_OF_FEW if tokens <= FEW_TOKENS else repeated)


def refuses(tokens: int, columns: int, *tensors: Tensor | None) -> str | None:
    """Return why oneDNN is not for the products of these tensors, in which `tokens` rows become `columns` long."""
    for x in tensors:
        if x is not None and (x.dtype != torch.float32 or x.device.type != "cpu"):
            return f"it takes float32 on the CPU, a tensor is {x.dtype} on {x.device}"
    inner = tensors[0].shape[-1] if tensors[0] is not None else 0
    if not pays(tokens, columns, inner):
        return f"the product is small for its number of tokens: {tokens} x {inner} x {columns}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    return unavailable()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Compute x W^T + b for x (N, K) and weight (M, K), through ReLU if asked; autograd does not see it."""
    if refuses(x.shape[0], weight.shape[0], x, weight, bias) is not None:
        y = F.linear(x, weight, bias)
        return y.relu_() if relu else y
    return _onednn(x, weight, bias, relu)


def outer_product(dy: Tensor, x: Tensor) -> Tensor:
    """Compute dy^T x, (M, K), for dy (N, M) and x (N, K)."""
    if refuses(x.shape[0], dy.shape[1], x, dy) is not None:
        return dy.mT @ x
    # Faster with the longer axis last.
    return _onednn(x.mT, dy.mT).mT if dy.shape[1] > x.shape[1] else _onednn(dy.mT, x.mT)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "relu" if relu else "none", [], "")
    return y
