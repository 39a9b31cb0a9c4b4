"""May the kernels of the short convolution run, and are they right on this GPU?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops.gpu import device
from fastweights.ops.gpu.self_check import Check, relative_errors
from fastweights.ops.gpu.short_convolution import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_TAPS = 8


class Kind(NamedTuple):
    """What the kernels are compiled for, sizes aside: taps, whether there is SiLU, and which tensors there are."""

    dtype: torch.dtype
    taps: int
    silu: bool
    bias: bool = False
    recent: bool = False
    packed: bool = False
    starts: bool = False

    def __str__(self) -> str:
        """The dtype, taps, and what there is."""
        present = [name for name in self._fields[2:] if getattr(self, name)]
        return ", ".join([str(self.dtype).removeprefix("torch."), f"{self.taps} taps", *present])


def refuses(tensors: Sequence[Any], settings: Sequence[Any]) -> str | None:
    """Say why the kernels are not for such a call; None where they are."""
    x, weight, bias, recent, mask, bounds, starts = tensors
    if reason := device.refuses(x, DTYPES, (torch.float32, torch.float64)):
        return reason
    if mask is not None:
        return "what a token sees across padding lies any number of tokens back"
    if weight.shape[1] > MOST_TAPS:
        return f"they hold inputs of up to {MOST_TAPS} taps in registers, got {weight.shape[1]}"
    if x.numel() == 0:
        return "there are no tokens"
    for other in (weight, bias, recent, bounds, starts):
        if other is not None and other.device != x.device:
            return f"x is on {x.device}, another tensor on {other.device}"
    present = (other is not None for other in (bias, recent, bounds, starts))
    return check_of(Kind(x.dtype, weight.shape[1], settings[0], *present)).refusal(x.device)


@cache
def check_of(kind: Kind) -> Check:
    """Return the check of the kernels of this kind."""
    return Check(
        key=str(kind),
        kernels=f"the kernels of the short convolution for {kind}",
        source=Path(__file__).parent,
        dtype=kind.dtype,
        compare=lambda device: compare(kind, device, 2, 150, 200),
    )


def compare(kind: Kind, device: torch.device, B: int, T: int, C: int) -> dict[str, float]:
    """Return how far outputs and gradients are from those in float64, relative to their norms.

    Packed sequences are four: one is empty, one has a single token, and the last ends before the tokens do.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(kind.dtype)

    B = 1 if kind.packed else B
    edges = [0, 0, 1, max(1, T // 2), max(1, T - T // 5)]
    spans = [(0, *pair) for pair in pairwise(edges)] if kind.packed else [(b, 0, T) for b in range(B)]
    reach = kind.taps - 1
    # A part of what a projection gives.
    x, dy = normal(B, T, C + 8)[..., :C], normal(B, T, C)
    weight, bias, recent = normal(C, kind.taps), normal(C), normal(len(spans), reach, C)
    inputs = [x, weight, bias if kind.bias else None, recent if kind.recent else None]
    bounds = torch.tensor(edges, device=device) if kind.packed else None
    starts = (torch.arange(B * T, device=device) * 7 % 23 == 3).view(B, T) if kind.starts else None
    tensors, grads = [*inputs, None, bounds, starts], [dy, normal(len(spans), reach, C)]
    ours = [*launch.forward(tensors, (kind.silu,)), *launch.backward(grads, tensors, (kind.silu,))[:4]]
    exact = [None if t is None else t.double().requires_grad_() for t in inputs]
    given = [t for t in exact if t is not None]
    with torch.enable_grad():
        want = reference(exact, spans, starts, kind.silu)
        gradients = torch.autograd.grad(want, given, [g.double() for g in grads])
    names = [name for name, t in zip(("x", "weight", "bias", "recent"), exact, strict=True) if t is not None]
    found = [t for t in ours if t is not None]
    return relative_errors(("y", "recent_end", *names), found, (*want, *gradients))


def reference(
    inputs: Sequence[Any], spans: Sequence[tuple[int, int, int]], starts: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Convolve each text by itself; `spans` are the row, first token and end of each sequence."""
    x, weight, bias, recent = inputs
    reach, y, ends = weight.shape[1] - 1, torch.zeros_like(x), []
    begins = {} if starts is None else {tuple(at) for at in starts.nonzero().tolist()}
    for n, (row, first, end) in enumerate(spans):
        before = x.new_zeros(reach, x.shape[2]) if recent is None else recent[n]
        for start, stop in pairwise([first, *(t for t in range(first + 1, end) if (row, t) in begins), end]):
            before = torch.zeros_like(before) if (row, start) in begins and start < end else before
            longer = torch.cat([before, x[row, start:stop]])
            z = sum(weight[:, j] * longer[reach - j : len(longer) - j] for j in range(reach + 1))
            z = z if bias is None else z + bias
            y[row, start:stop] = torch.nn.functional.silu(z) if silu else z
            before = longer[len(longer) - reach :]
        ends.append(before)
    return y, torch.stack(ends)
