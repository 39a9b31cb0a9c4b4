"""May the kernels of the softmax with label smoothing run, and are they right on this GPU?"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fastweights.ops.gpu import device
from fastweights.ops.gpu.label_smoothing import launch
from fastweights.ops.gpu.self_check import Check, relative_errors

DTYPES = (torch.bfloat16, torch.float32)
SMOOTHING = 0.1


def refuses(logits: Tensor) -> str | None:
    """Say why the kernels are not for these logits, None if they are."""
    return device.refuses(logits, DTYPES, (torch.float32,)) or check_of(logits.dtype).refusal(logits.device)


@cache
def check_of(dtype: torch.dtype) -> Check:
    """Return the check of the kernels for logits of this dtype."""
    return Check(
        key=str(dtype),
        kernels=f"the kernels of the softmax with label smoothing for {dtype}",
        source=Path(__file__).parent,
        dtype=dtype,
        compare=lambda device: compare(dtype, device, 300, 2 * launch.BLOCK + 77),
    )


def compare(dtype: torch.dtype, device: torch.device, rows: int, words: int) -> dict[str, float]:
    """Return how far losses and gradients are from those in float64, relative to their norms."""
    generator = torch.Generator(device).manual_seed(0)
    logits = (3 * torch.randn(rows, words, generator=generator, device=device)).to(dtype)
    targets = torch.randint(words, (rows,), generator=generator, device=device)
    d_smoothed, d_nll = torch.randn(2, rows, generator=generator, device=device)
    losses = launch.forward(logits, targets, SMOOTHING)
    d_logits = launch.backward(d_smoothed, d_nll, logits, targets, losses.totals, SMOOTHING)
    with torch.enable_grad():
        exact = logits.double().requires_grad_()
        log_p = exact.log_softmax(-1)
        nll = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        smoothed = (1 - SMOOTHING) * nll - SMOOTHING * log_p.mean(-1)
        (gradient,) = torch.autograd.grad((d_smoothed * smoothed + d_nll * nll).sum(), exact)
    ours = (losses.smoothed, losses.nll, d_logits)
    return relative_errors(("smoothed", "nll", "logits"), ours, (smoothed, nll, gradient))
