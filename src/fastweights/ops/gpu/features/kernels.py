# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of feature maps that go entry by entry, and of norms: a head is read once and written once.

A program has some heads. Heads lie one after the other, H of them in a token; tokens of x and dphi may be further
apart.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from fastweights.ops.gpu.common import below, exponential, heads_of, rectified, sigmoid


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a kernel is compiled for, `o` in the code.

    A program has `heads` heads in `block` columns. `x_row` and `dphi_row` are the entries from one token of x and of
    dphi to the next.
    """

    H: int
    M: int
    """Entries of a head, before and after its map."""
    map: str
    """ "none", "elu", "relu" or "silu"."""
    norm: str
    """ "none", "sum" or "l2"."""
    scale: float
    eps: float
    """Added to the squares under the root of "l2"."""
    x_row: int
    dphi_row: int
    heads: int
    block: int
    acc: Any


@triton.jit
def some_heads(count, o: tl.constexpr):
    """Return the numbers of a program's heads, their columns, and which of all these entries there are."""
    head = tl.program_id(0) * o.heads + tl.arange(0, o.heads)
    m = tl.arange(0, o.block)
    return head, m, (head[:, None] < count) & (m[None, :] < o.M)


@triton.jit
def mapped(x, there, o: tl.constexpr):
    """phi before its normalisation, 0 where no entry is."""
    phi = x
    if o.map == "elu":
        phi = tl.where(there, exponential(below(x)) + rectified(x), 0.0)
    elif o.map == "relu":
        phi = rectified(x)
    elif o.map == "silu":
        phi = x * sigmoid(x)
    return phi


@triton.jit
def normalizer(phi, o: tl.constexpr):
    """What the features of each head are multiplied by."""
    if o.norm == "l2":
        factor = 1.0 / tl.sqrt(tl.sum(phi * phi, 1) + o.eps)
    elif o.norm == "sum":
        # Where there is no sum, as `normalization.safe_divide` has it: the square root of the smallest normal number.
        tiny: tl.constexpr = 1.4916681462400413e-154 if tl.float64 == o.acc else 1.0842021724855044e-19
        total = tl.sum(phi, 1)
        empty = tl.abs(total) < tiny
        factor = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    else:
        factor = tl.full((o.heads,), 1.0, o.acc)
    return factor


@triton.jit
def map_heads(
    x,  # (tokens, H, M)
    out,  # (tokens, H, M)
    count,  # tokens H
    o: tl.constexpr,
):
    """Compute the features of some heads.

    phi = map(x)
    out = scale * phi / phi.sum(-1)                                 # "sum"; or / (phi.square().sum(-1) + eps).sqrt()
    """
    head, m, there = some_heads(count, o)
    phi = mapped(heads_of(x, head, m, there, o.x_row, o), there, o)
    phi *= (normalizer(phi, o) * o.scale)[:, None]
    tl.store(out + head.to(tl.int64)[:, None] * o.M + m[None, :], phi.to(out.dtype.element_ty), there)


@triton.jit
def map_heads_gradients(
    dphi,  # (tokens, H, M)
    x,  # (tokens, H, M)
    dx,  # (tokens, H, M)
    count,  # tokens H
    o: tl.constexpr,
):
    """Compute the gradients of some heads.

    d = scale * dphi
    d = (d - n * (d * n).sum(-1)) / norm                            # "l2": n = phi / norm, "sum": (d * n).sum(-1) alone
    dx = d * map'(x)
    """
    head, m, there = some_heads(count, o)
    raw = heads_of(x, head, m, there, o.x_row, o)
    d = heads_of(dphi, head, m, there, o.dphi_row, o) * o.scale
    if o.norm != "none":
        phi = mapped(raw, there, o)
        factor = normalizer(phi, o)[:, None]
        n = phi * factor
        along = tl.sum(d * n, 1)[:, None]
        if o.norm == "l2":
            along *= n
        d = factor * (d - along)
    if o.map == "elu":
        d = tl.where(raw > 0, d, d * exponential(below(raw)))
    elif o.map == "relu":
        d = tl.where(raw > 0, d, 0.0)
    elif o.map == "silu":
        s = sigmoid(raw)
        d *= s + raw * s * (1.0 - s)
    tl.store(dx + head.to(tl.int64)[:, None] * o.M + m[None, :], d.to(dx.dtype.element_ty), there)
