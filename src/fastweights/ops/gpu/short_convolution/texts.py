# mypy: disable-error-code="no-untyped-def"
"""Which text a token is in: what the kernels of the short convolution find out on the device.

Sequences lie between bounds in one row, or are rows of T tokens each; texts begin with a sequence, and where `starts`
says so. The age of a token is the number of tokens of its text before it, or -1 where it is in no sequence.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a kernel is compiled for, `o` in the code.

    A program has `channels` of `tile` tokens, in blocks of `block` tokens; `window` is a power of 2 and at least
    block + reach. `x_row` and `dy_row` are the entries from one token of x and dy to the next.
    """

    taps: int
    silu: bool
    packed: bool
    C: int
    x_row: int
    dy_row: int
    channels: int
    tile: int
    block: int
    window: int
    acc: Any


@triton.jit
def sequence_of(bounds, row, t, T, N, o: tl.constexpr):
    """Return which sequence has token t of a row, its first token and its end; t + 1 for both where none has it."""
    if o.packed:
        # How many bounds are at most t.
        low = t * 0
        high = low + N + 1
        while low < high:
            middle = (low + high) // 2
            passed = tl.load(bounds + middle) <= t
            low, high = tl.where(passed, middle + 1, low), tl.where(passed, high, middle)
        n = low - 1
        between = (n >= 0) & (n < N)
        start = tl.load(bounds + n, between, 0).to(tl.int32)
        end = tl.minimum(tl.load(bounds + n + 1, between, 0).to(tl.int32), T)
    else:
        n, start, end = row, t * 0, t * 0 + T
    inside = (start >= 0) & (start <= t) & (t < end)
    return tl.where(inside, n, 0), tl.where(inside, start, t + 1), tl.where(inside, end, t + 1)


@triton.jit
def limits_of(bounds, n, T, o: tl.constexpr):
    """Return the row of sequence n, its first token and its end."""
    if o.packed:
        start = tl.minimum(tl.maximum(tl.load(bounds + n).to(tl.int32), 0), T)
        end = tl.minimum(tl.maximum(tl.load(bounds + n + 1).to(tl.int32), start), T)
        row = n * 0
    else:
        row, start, end = n, n * 0, n * 0 + T
    return row, start, end


@triton.jit
def is_start(starts, row, t, T, there):
    """Return whether a text begins at token t of a row, False where it is not `there`."""
    return tl.load(starts + row.to(tl.int64) * T + t, there, 0) != 0


@triton.jit
def text_at(starts, bounds, row, t, T, N, o: tl.constexpr):
    """Return the sequence of token t, its end, the age of t, and whether what is carried in lies before its text."""
    REACH: tl.constexpr = o.taps - 1
    n, start, end = sequence_of(bounds, row, t, T, N, o)
    age = t - start
    continues = age >= 0
    if starts is not None:
        for back in tl.static_range(REACH, -1, -1):
            begins = is_start(starts, row, t - back, T, back <= t - start)
            age = tl.where(begins, back, age)
            continues = continues & ~begins
    return n, end, age, continues


@triton.jit
def sees_one_text(starts, row, t, start, end, T, o: tl.constexpr):
    """Return whether all that the block of tokens at t sees is of one text, in a sequence from start to end."""
    within = (start <= t - (o.taps - 1)) & (t + o.block <= end)
    if starts is not None:
        at = t - (o.taps - 2) + tl.arange(0, o.window)
        begins = tl.load(starts + row.to(tl.int64) * T + at, (at >= 0) & (at < tl.minimum(t + o.block, T)), 0)
        within = within & (tl.max(begins.to(tl.int32), 0) == 0)
    return within
