# mypy: disable-error-code="no-untyped-def"
"""What the kernels of several operations share: functions of a number, loading heads, adding what programs summed."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), for which `tl.sigmoid` has three instructions more."""
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def exponential(x):
    """e^x, 0 where it is less than the smallest normal number: `tl.exp` has five instructions to this one's two."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def rectified(x):
    """max(0, x). Not a plain `tl.maximum`, which makes 0 of what is not a number."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def below(x):
    """min(0, x), likewise."""
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def heads_of(x, head, m, there, ROW: tl.constexpr, o: tl.constexpr):
    """Load columns m of some heads, by their numbers: H of them are a token, and the next token is `ROW` further."""
    start = (head // o.H).to(tl.int64) * ROW + head % o.H * o.M
    return tl.load(x + start[:, None] + m[None, :], there, 0.0).to(o.acc)


@triton.jit(do_not_specialize=["n"])
def add_parts(
    parts,  # (n, K, C), K = columns of `total`, and one more where there is a `last`
    total,  # (C, columns)
    last,  # (C,) or None
    n,
    C,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add what programs have summed, always in the same order.

    total = parts.sum(0)[:columns].T
    last = parts.sum(0)[columns]
    """
    K = columns
    if last is not None:
        K += 1
    k = tl.program_id(0) % K
    c = tl.program_id(0) // K * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, BLOCK), parts.dtype.element_ty)
    for first in range(0, n, ROWS):
        at = first + rows
        there = (at[:, None] < n) & (c[None, :] < C)
        sums += tl.load(parts + (at.to(tl.int64) * K + k)[:, None] * C + c[None, :], there, 0.0)
    found = tl.sum(sums, 0)
    tl.store(total + c * columns + k, found.to(total.dtype.element_ty), (c < C) & (k < columns))
    if last is not None:
        tl.store(last + c, found.to(last.dtype.element_ty), (c < C) & (k == columns))
