"""May the softmax kernels run, and are they right on this GPU? Compared with float64 before they are first used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fastweights.layers.adaptive_dense import TILE_BYTES, adaptive_nll
from fastweights.layers.adaptive_fused import TABLE, Config, configuration, fused_nll
from fastweights.ops.gpu.device import interpreted, unavailable

# Relative to the norm; a miscompilation is off by far more.
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


def refuses(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the kernels are not for these tensors."""
    if reason := unavailable():
        return reason
    if weight.numel() >= 2**31:
        return f"the kernels address up to 2**31 weights, got {weight.numel()}"
    if interpreted():
        right = hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.float64)
        return None if right else f"Triton's interpreter takes float32 and float64 on the CPU, not {hidden.dtype}"
    if hidden.device.type != "cuda":
        return f"the kernels run on CUDA devices, the tensors are on {hidden.device}"
    for name, x in (("hidden vectors", hidden), ("weights", weight)):
        if x.dtype not in LIMITS:
            return f"the kernels take {name} in bfloat16 and float32, not in {x.dtype}"
    if hidden.shape[-1] > (largest := max(TABLE[hidden.dtype])):
        return f"d_model may be up to {largest} in {hidden.dtype}, got {hidden.shape[-1]}"
    # Tracing has no numbers to check with; the custom op checks when it first runs.
    return None if torch.compiler.is_compiling() else distrust(hidden, weight)


def distrust(hidden: Tensor, weight: Tensor) -> str | None:
    """What the self-check found wrong with the kernels for these tensors."""
    return _verdict(hidden.dtype, weight.dtype, hidden.shape[-1], hidden.device) if hidden.is_cuda else None


@cache
def _verdict(dtype: torch.dtype, weight_dtype: torch.dtype, d: int, device: torch.device) -> str | None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the softmax kernels have not been checked on this GPU, and a CUDA graph is being captured: "
            "run the call once before"
        )
    errors = compare(dtype, weight_dtype, d, device, tokens=700, words=9000, cutoffs=(500, 1000, 7500))
    if wrong := {name: error for name, error in errors.items() if not error <= LIMITS[dtype]}:
        off = ", ".join(f"{name} by {error:.0e}" for name, error in wrong.items())
        reason = f"the softmax kernels for {dtype}, d = {d} are wrong on this machine: off {off}"
        warnings.warn(f"{reason}. They will not be used here, plain PyTorch is; please report this.", stacklevel=2)
        return reason
    return None


def compare(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    d: int,
    device: torch.device,
    tokens: int,
    words: int,
    cutoffs: Sequence[int],
    targets: Tensor | None = None,
    config: Config | None = None,
) -> dict[str, float]:
    """How far losses and gradients are from those of the dense path in float64, relative to their norms.

    `targets` are as many in each softmax if not given.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        C = len(cutoffs)
        kinds = [((tokens, d), dtype), ((words, d), weight_dtype), ((words,), weight_dtype)]
        kinds += [((C, d), weight_dtype), ((C,), weight_dtype)]
        inputs = [torch.randn(shape, device=device).to(kind) for shape, kind in kinds]
        if targets is None:
            bounds = torch.tensor([0, *cutoffs, words], device=device)
            place = torch.randint(C + 1, (tokens,), device=device)
            size = bounds[place + 1] - bounds[place]
            targets = bounds[place] + (torch.rand(tokens, device=device) * size).long()
        grad = torch.randn(tokens, device=device)
    # Logits of size 1, from the very numbers that the kernels multiply.
    inputs[1], inputs[3] = inputs[1] * d**-0.5, inputs[3] * d**-0.5
    rounded = [x.to(dtype) if x.dim() == 2 else x for x in inputs]
    exact = [x.double() for x in rounded]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for x in (*inputs, *exact):
            x.requires_grad_()
        settings = list(config or configuration(dtype, d))
        nll, *_ = fused_nll(*inputs, targets, list(cutoffs), True, settings, True)
        expected, _ = adaptive_nll(*exact, targets, list(cutoffs), 4 * TILE_BYTES)
        ours = [nll, *torch.autograd.grad(nll, inputs, grad.to(nll.dtype))]
        theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    names = ("nll", "hidden", "weight", "bias", "cluster_weight", "cluster_bias")
    pairs = [(n, a.detach(), b.detach()) for n, a, b in zip(names, ours, theirs, strict=True) if a.numel()]
    return {name: (a.double() - b).norm().div(b.norm()).item() for name, a, b in pairs}
