"""May the feed-forward kernels run, and are they right on this GPU?"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fastweights.ops.gpu import device
from fastweights.ops.gpu.feedforward import launch
from fastweights.ops.gpu.self_check import Check, relative_errors

LARGEST_D = max(launch.TILES)
# "dropped" is in thousands of standard deviations of the share that is dropped.
LIMITS = {"dropped": 6e-3}


def refuses(x: Tensor, d_ff: int, p: float) -> str | None:
    """Say why the kernels are not for this input with that share dropped, None if they are."""
    if reason := device.refuses(x, (torch.bfloat16,), (torch.float32, torch.float64)):
        return reason
    if x.shape[-1] > LARGEST_D:
        return f"d_model may be up to {LARGEST_D}, got {x.shape[-1]}"
    if x.numel() // x.shape[-1] * d_ff >= 2**31:
        return f"{x.numel() // x.shape[-1]} tokens times d_ff = {d_ff} are more than can be numbered"
    # Tracing has no numbers to check with; the custom op checks when it first runs.
    return None if torch.compiler.is_compiling() else check_of(x.shape[-1], d_ff, p).refusal(x.device)


@cache
def check_of(d_model: int, d_ff: int, p: float) -> Check:
    """Return the check of the kernels for these sizes and this share dropped."""
    return Check(
        key=f"d_model = {d_model}, d_ff = {d_ff}, dropout {p}",
        kernels=f"the feed-forward kernels for d_model = {d_model}",
        source=Path(__file__).parent,
        dtype=torch.bfloat16,
        compare=lambda device: compare(torch.bfloat16, d_model, d_ff, device, 300, p),
        limits=LIMITS,
    )


def compare(
    dtype: torch.dtype, d_model: int, d_ff: int, device: torch.device, tokens: int, p: float = 0.1
) -> dict[str, float]:
    """Return how far output and gradients are from float64 with the same entries dropped, relative to their norms.

    "dropped" is how far their share is from p, in thousands of standard deviations.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    x, dy, b1 = normal(tokens, d_model), normal(tokens, d_model), normal(d_ff, dtype=torch.float32)
    w1, w2 = normal(d_ff, d_model, scale=d_model**-0.5), normal(d_model, d_ff, scale=d_ff**-0.5)
    seed = torch.randint(2**31 - 1, (2,), generator=generator, device=device)
    y, middle = launch.forward(x, w1, b1, w2, seed, p)
    grads = launch.backward(dy, x, w1, w2, middle, p)
    exact = [x.double() for x in (x, w1, b1, w2)]
    with torch.enable_grad():
        for tensor in exact:
            tensor.requires_grad_()
        h = torch.addmm(exact[2], exact[0], exact[1].mT).relu()
        # The smallest may round to 0 in 16 bits, which drops nothing that counts.
        want = (h * (middle != 0) / (1 - p)) @ exact[3].mT
        exact_grads = torch.autograd.grad((want * dy).sum(), exact)
    errors = relative_errors(("y", "x", "w1", "b1", "w2"), (y, *grads), (want, *exact_grads))
    alive = h.detach() > 0
    share = (middle[alive] == 0).double().mean().item()
    errors["dropped"] = 1e-3 * abs(share - p) / max((p * (1 - p) / max(1, int(alive.sum()))) ** 0.5, 1e-30)
    return errors
