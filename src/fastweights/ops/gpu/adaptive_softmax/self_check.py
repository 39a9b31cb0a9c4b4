"""May the softmax kernels run, and are they right on this GPU?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fastweights.ops.gpu import device
from fastweights.ops.gpu.adaptive_softmax import launch
from fastweights.ops.gpu.adaptive_softmax.variants import TABLE, Config, configuration
from fastweights.ops.gpu.self_check import Check, relative_errors
from fastweights.ops.losses.adaptive_softmax import plain_nll

DTYPES = (torch.bfloat16, torch.float32)


def refuses(hidden: Tensor, weight: Tensor) -> str | None:
    """Say why the kernels are not for these tensors, None if they are."""
    if reason := device.refuses(hidden, DTYPES, (torch.float32, torch.float64)):
        return reason
    if weight.numel() >= 2**31:
        return f"the kernels address up to 2**31 weights, got {weight.numel()}"
    if hidden.is_cuda and weight.dtype not in DTYPES:
        return f"the kernels take weights in bfloat16 and float32, not in {weight.dtype}"
    if hidden.shape[-1] > (largest := max(TABLE[hidden.dtype])):
        return f"d_model may be up to {largest} in {hidden.dtype}, got {hidden.shape[-1]}"
    # Tracing has no numbers to check with; the custom op checks when it first runs.
    return None if torch.compiler.is_compiling() else refusal(hidden, weight)


def refusal(hidden: Tensor, weight: Tensor) -> str | None:
    """Say what the self-check found wrong with the kernels for these tensors."""
    return check_of(hidden.dtype, weight.dtype, hidden.shape[-1]).refusal(hidden.device)


@cache
def check_of(dtype: torch.dtype, weight_dtype: torch.dtype, d: int) -> Check:
    """Return the check of the kernels for these dtypes and this d_model."""
    return Check(
        key=f"{dtype}, weights {weight_dtype}, d = {d}, {configuration(dtype, d)}",
        kernels=f"the softmax kernels for {dtype}, d = {d}",
        source=Path(__file__).parent,
        dtype=dtype,
        compare=lambda device: compare(dtype, weight_dtype, d, device, 700, 9000, (500, 1000, 7500)),
    )


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
    """Return how far losses and gradients are from those of `plain_nll` in float64, relative to their norms.

    Every softmax has about as many of the `targets` if they are not given.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = weight_dtype, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    # Logits of size 1.
    C, scale = len(cutoffs), d**-0.5
    weights = (normal(words, d, scale=scale), normal(words), normal(C, d, scale=scale), normal(C))
    hidden = normal(tokens, d, dtype=dtype)
    if targets is None:
        bounds = torch.tensor([0, *cutoffs, words], device=device)
        softmax = torch.randint(C + 1, (tokens,), generator=generator, device=device)
        share = torch.rand(tokens, generator=generator, device=device)
        targets = bounds[softmax] + (share * (bounds[softmax + 1] - bounds[softmax])).long()
    grad = normal(tokens, dtype=torch.promote_types(dtype, torch.float32))
    config = config or configuration(dtype, d)
    nll, kept = launch.forward(hidden, weights, targets, cutoffs, True, config)
    ours = [nll, kept.slope * grad.unsqueeze(1), *launch.backward(grad, kept, cutoffs, weight_dtype, config)]
    # The very numbers that the kernels multiply.
    exact = [x.to(dtype).double() if x.dim() == 2 else x.double() for x in (hidden, *weights)]
    with torch.enable_grad():
        for x in exact:
            x.requires_grad_()
        want = plain_nll(exact[0], exact[1:], targets, cutoffs)
        # Of a number: the gradient of a tensor imports PyTorch's symbolic shapes, which takes longer than the rest.
        grads = torch.autograd.grad((want * grad).sum(), exact)
    names = ("nll", "hidden", "weight", "bias", "cluster_weight", "cluster_bias")
    return relative_errors(names, ours, [want, *grads])
