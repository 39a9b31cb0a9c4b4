# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the gated root-mean-square norm: a head is read once and stays in registers until it is written.

A program has some heads at a time. Heads lie one after the other, H of them in a token; tokens of x, gate and dy may be
further apart.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from fastweights.ops.gpu.common import heads_of, sigmoid


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a kernel is compiled for, `o` in the code.

    A program has `heads` heads at a time, `turns` times, in `block` columns. `x_row`, `gate_row` and `dy_row` are the
    entries from one token of x, gate and dy to the next.
    """

    H: int
    M: int
    silu: bool
    eps: float
    scale: float
    x_row: int
    gate_row: int
    dy_row: int
    heads: int
    turns: int
    block: int
    acc: Any


@triton.jit
def normalized(x, head, m, there, o: tl.constexpr):
    """Return heads of x divided by their root mean square, and what they were multiplied by."""
    n = heads_of(x, head, m, there, o.x_row, o) * o.scale
    factor = 1.0 / tl.sqrt(tl.sum(n * n, 1) / o.M + o.eps)
    return n * factor[:, None], factor * o.scale


@triton.jit
def normalize(
    x,  # (tokens, H, M)
    weight,  # (M,)
    gate,  # (tokens, H, M) or None
    y,  # (tokens, H, M)
    count,  # tokens H
    o: tl.constexpr,
):
    """Compute y for some heads.

    n = scale * x / sqrt(((scale * x) ** 2).mean(-1) + eps)
    y = n * weight * opening(gate)                                  # silu or sigmoid, 1 without a gate
    """
    m = tl.arange(0, o.block)
    w = tl.load(weight + m, m < o.M, 0.0).to(o.acc)
    first = tl.program_id(0) * (o.heads * o.turns)
    for turn in range(o.turns):
        head = first + turn * o.heads + tl.arange(0, o.heads)
        there = (head[:, None] < count) & (m[None, :] < o.M)
        n, _ = normalized(x, head, m, there, o)
        out = n * w[None, :]
        if gate is not None:
            g = heads_of(gate, head, m, there, o.gate_row, o)
            out *= sigmoid(g)
            if o.silu:
                out *= g
        tl.store(y + head.to(tl.int64)[:, None] * o.M + m[None, :], out.to(y.dtype.element_ty), there)


@triton.jit
def normalize_gradients(
    dy,  # (tokens, H, M)
    x,  # (tokens, H, M)
    weight,  # (M,)
    gate,  # (tokens, H, M) or None
    dx,  # (tokens, H, M)
    d_gate,  # (tokens, H, M) or None
    parts,  # (programs, 1, M): sums over the heads of a program
    count,  # tokens H
    o: tl.constexpr,
):
    """Compute the gradients for some heads, with n as in `normalize`.

    d_gate = dy * n * weight * opening'(gate)                       # s + gate * s * (1 - s), or s * (1 - s)
    d = dy * opening(gate)                                          # s = sigmoid(gate)
    parts = (d * n).sum(heads)
    dx = scale / sqrt(((scale * x) ** 2).mean(-1) + eps) * (d * weight - n * (d * weight * n).mean(-1))
    """
    m = tl.arange(0, o.block)
    w = tl.load(weight + m, m < o.M, 0.0).to(o.acc)
    first = tl.program_id(0) * (o.heads * o.turns)
    sums = tl.full((o.heads, o.block), 0.0, o.acc)
    for turn in range(o.turns):
        head = first + turn * o.heads + tl.arange(0, o.heads)
        there = (head[:, None] < count) & (m[None, :] < o.M)
        place = head.to(tl.int64)[:, None] * o.M + m[None, :]
        n, factor = normalized(x, head, m, there, o)
        d = heads_of(dy, head, m, there, o.dy_row, o)
        if gate is not None:
            g = heads_of(gate, head, m, there, o.gate_row, o)
            s = sigmoid(g)
            slope = s * (1.0 - s)
            opened = s
            if o.silu:
                slope = s + g * slope
                opened = g * s
            tl.store(d_gate + place, (d * n * w[None, :] * slope).to(d_gate.dtype.element_ty), there)
            d *= opened
        # A head that is not there has zeros, and no column past the last counts.
        sums += d * n
        d *= w[None, :]
        mean = tl.sum(d * n, 1) / o.M
        d = factor[:, None] * (d - n * mean[:, None])
        tl.store(dx + place, d.to(dx.dtype.element_ty), there)
    tl.store(parts + tl.program_id(0).to(tl.int64) * o.M + m, tl.sum(sums, 0), m < o.M)
