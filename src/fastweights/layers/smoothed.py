"""The losses of a softmax with label smoothing, on a GPU without float32 copies of the logits."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.ops.gpu.device import interpreted, unavailable

# Logits of a row that a program has at a time, and its warps.
BLOCK, WARPS = 4096, 8
# Relative to the norm; a miscompilation is off by far more.
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


def smoothed_nll(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Losses (...) in nats of targets (...) under logits (..., V), with label smoothing and without; float32 at least.

    Equivalent to

        log_p = log_softmax(logits, -1)
        nll = -log_p[targets]
        (1 - smoothing) * nll - smoothing * log_p.mean(-1), nll

    Targets must be from 0 to V - 1; on a GPU nobody looks.
    """
    if not torch.compiler.is_compiling() and refuses(logits) is None:
        smoothed, nll = _Fused.apply(logits.flatten(0, -2), targets.flatten(), smoothing)
        return smoothed.view(targets.shape), nll.view(targets.shape)
    return dense_nll(logits, targets, smoothing)


def dense_nll(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = logits.logsumexp(-1)
    nll = total - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return nll if not smoothing else torch.lerp(nll, total - logits.mean(-1), smoothing), nll


def refuses(logits: Tensor) -> str | None:
    """Why the kernels are not for these logits."""
    if reason := unavailable():
        return reason
    if interpreted():
        right = logits.device.type == "cpu" and logits.dtype == torch.float32
        return None if right else f"Triton's interpreter takes float32 on the CPU, not {logits.dtype}"
    if not logits.is_cuda:
        return f"the kernels run on CUDA devices, the tensors are on {logits.device}"
    if logits.dtype not in LIMITS:
        return f"the kernels take bfloat16 and float32, not {logits.dtype}"
    return _verdict(logits.dtype, logits.device)


@cache
def _verdict(dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with the kernels on this GPU, found before they are first used."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the softmax kernels have not been checked on this GPU, and a CUDA graph is being captured")
    errors = compare(dtype, device, 300, 2 * BLOCK + 77)
    if wrong := {name: error for name, error in errors.items() if not error <= LIMITS[dtype]}:
        off = ", ".join(f"{name} by {error:.0e}" for name, error in wrong.items())
        reason = f"the kernels of the softmax with label smoothing for {dtype} are wrong on this machine: off {off}"
        warnings.warn(f"{reason}. They will not be used here, plain PyTorch is; please report this.", stacklevel=2)
        return reason
    return None


def compare(dtype: torch.dtype, device: torch.device, rows: int, words: int) -> dict[str, float]:
    """How far losses and gradients are from those in float64, relative to their norms."""
    generator = torch.Generator(device).manual_seed(0)
    logits = (3 * torch.randn(rows, words, generator=generator, device=device)).to(dtype)
    targets = torch.randint(words, (rows,), generator=generator, device=device)
    grads = list(torch.randn(2, rows, generator=generator, device=device))
    exact = logits.double()
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for x in (logits, exact):
            x.requires_grad_()
        ours = [*_Fused.apply(logits, targets, 0.1)]
        theirs = [*dense_nll(exact, targets, 0.1)]
        ours += torch.autograd.grad(ours, logits, grads)
        theirs += torch.autograd.grad(theirs, exact, [grad.double() for grad in grads])
    names = ("smoothed", "nll", "logits")
    pairs = [(name, a.detach(), b.detach()) for name, a, b in zip(names, ours, theirs, strict=True)]
    return {name: (a.double() - b).norm().div(b.norm()).item() for name, a, b in pairs}


def _device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        from fastweights.layers.smoothed_kernels import row_losses

        logits, targets = logits.contiguous(), targets.contiguous()
        N, V = logits.shape
        smoothed, nll, totals = (logits.new_empty(N, dtype=torch.float32) for _ in range(3))
        with _device(logits):
            how = {"SMOOTHING": smoothing, "BLOCK": BLOCK, "num_warps": WARPS}
            row_losses[(N,)](logits, targets, smoothed, nll, totals, V, **how)
        ctx.save_for_backward(logits, targets, totals)
        ctx.smoothing = smoothing
        ctx.set_materialize_grads(False)
        return smoothed, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_smoothed: Tensor | None, d_nll: Tensor | None) -> tuple[Tensor | None, None, None]:
        from fastweights.layers.smoothed_kernels import row_gradients

        logits, targets, totals = ctx.saved_tensors
        if d_smoothed is None and d_nll is None:
            return None, None, None
        g = (torch.zeros_like(totals) if d_smoothed is None else d_smoothed).contiguous()
        h = g if d_nll is None else d_nll.contiguous()
        d_logits = torch.empty_like(logits)
        with _device(logits):
            how = {"SMOOTHING": ctx.smoothing, "BOTH": d_nll is not None, "BLOCK": BLOCK, "num_warps": WARPS}
            row_gradients[(len(logits),)](logits, targets, totals, g, h, d_logits, logits.shape[1], **how)
        return d_logits, None, None
