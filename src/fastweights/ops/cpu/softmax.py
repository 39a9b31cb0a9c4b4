"""A softmax and its losses in one pass in C++, csrc/layers/softmax.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastweights.ops.cpu.build import library, refuses_tensors


class Softmax(ctypes.Structure):
    """One call to the C++."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "size", "wide")),
        *((name, ctypes.c_void_p) for name in ("logits", "targets", "nll")),
    )


def softmax_nll(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(logits), in the memory of logits (N, K), and -log p(target) (N,) for targets (N,).

    They must be in float32 or float64, and autograd does not see it.
    """
    if refuses_tensors(logits) is not None or logits.numel() == 0:
        log_p = torch.log_softmax(logits, -1)
        nll = -log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        return log_p.exp_(), nll
    rows, size = logits.shape
    # The C++ believes what it is told.
    if logits.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logits must be float32 or float64, got {logits.dtype}; cast them with .float()")
    if not bool(((targets >= 0) & (targets < size)).all()):
        raise IndexError(f"targets must be from 0 to {size - 1}, got {int(targets.min())} to {int(targets.max())}")
    logits, targets, nll = logits.contiguous(), targets.long().contiguous(), logits.new_empty(rows)
    addresses = (x.data_ptr() for x in (logits, targets, nll))
    library().fastweights_softmax(ctypes.byref(Softmax(rows, size, logits.dtype == torch.float64, *addresses)))
    return logits, nll
