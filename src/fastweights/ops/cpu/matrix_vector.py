"""The product of a matrix and one vector in C++, csrc/layers/matrix_vector.cpp: the logits of one token.

They are most of what a token of a model with many words costs, and PyTorch's product does not read the matrix as fast
as memory gives it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastweights.ops.cpu.build import library, refuses_tensors
from fastweights.ops.cpu.views import View
from fastweights.ops.eager import is_eager, wants_gradients


def takes(hidden: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return whether W x + b is for the C++: one x, eager, on the CPU and without gradients."""
    tensors = hidden, weight, bias
    one = hidden.numel() == weight.shape[1] and weight.stride(1) == 1
    return one and is_eager(*tensors) and not wants_gradients(*tensors) and refuses_tensors(*tensors) is None


def matrix_vector(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute W x + b (..., K) for x (..., d) with one vector, W (K, d) and b (K,), in float32 at least."""
    rows, size = weight.shape
    hidden, bias = hidden.contiguous(), bias.contiguous()
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    out = torch.empty((*hidden.shape[:-1], rows), dtype=wide)
    views = (View * 3)(View.of(weight, 1), View.of(hidden, 0), View.of(bias, 0))
    function = library().fastweights_matrix_vector
    function.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    function(rows, size, wide == torch.float64, views, out.data_ptr())
    return out
