# mypy: disable-error-code="no-untyped-def"
"""What the kernels of linear attention share: their options, keys that are there, and features of raw heads by blocks.

B sequences, T queries and S keys of H heads; a head has R entries before the map, D after it, and values of M. Kernels
take `block_D` features at a time. Maps and products are those of the memory's kernels; FAVOR+, whose random vectors
have to be read, is only known here.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.maps import load_raw, mapped, raw_gradient
from fastweights.ops.gpu.memory.kernels.tiles import (
    dot,
    exponential,
    leading_digits,
    load_rows,
    load_transposed,
    store_rows,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a kernel is compiled for, `o` in the code; what the memory's kernels have too is named as there."""

    H: int
    R: int
    D: int
    M: int
    C: int
    """Queries or keys of a tile."""
    block_R: int
    """Raw entries of a tile: those of `block_D` features, or with `whole` all of a head."""
    block_D: int
    block_M: int
    map: str = "none"
    normalized: bool = True
    """Divide by the sum of the weights (attention normalisation)."""
    masked: bool = False
    """There is a mask of the keys."""
    centred: bool = False
    """The memory is W - z c^T, and c is added to what is read."""
    whole: bool = False
    """Every feature may hang on any entry of a raw head: DPFP, FAVOR+."""
    vectors: int = 0
    """FAVOR+: m random vectors r make the features exp(r·x - level) and exp(-r·x - level)."""
    half_square: float = 0.0
    """FAVOR+: the level of a key is this times |x|², and `level` more."""
    level: float = 0.0
    gather: bool = False
    both_ways: bool = False
    sum: bool = False
    operand: tl.dtype = tl.float32
    acc: tl.dtype = tl.float32
    precision: str = "ieee"


@triton.jit
def of_head(x, head, tokens, token_stride, head_stride, o: tl.constexpr):
    """Where the first token of head number `head` of all sequences stands; each has so many `tokens`."""
    return x + (head // o.H) * tokens * token_stride + (head % o.H) * head_stride


@triton.jit
def present(mask, head, start, S, left, o: tl.constexpr):
    """Numbers of the C keys from `start` on, for one that is masked the number `left`: nothing of it is then read."""
    rows = tl.arange(0, o.C)
    if o.masked:
        there = tl.load(mask + (head // o.H) * S + start + rows, rows < left, 0)
        rows = tl.where(there != 0, rows, left)
    return rows


@triton.jit
def load_entries(x, rows, left, first, stride, AXIS: tl.constexpr, o: tl.constexpr):
    """What `block_D` features from `first` on are computed from, (C, R) or (R, C)."""
    if o.whole:
        raw = load_raw(x, rows, left, stride, AXIS, o)
    else:
        columns = first + tl.arange(0, o.block_D)
        if AXIS == 0:
            raw = load_transposed(x, rows, left, columns, stride, o.R, o.both_ways)
        else:
            raw = load_rows(x, rows, left, columns, stride, o.R)
    return raw


@triton.jit
def features(x, raw, rows, left, first, stride, vectors, level, AXIS: tl.constexpr, o: tl.constexpr):
    """`block_D` features from `first` on of the heads whose entries `load_entries` gave, (C, D) or (D, C).

    `level` (C,) is that of FAVOR+, and idle else.
    """
    phi = raw.to(o.acc)
    if o.map == "favor":
        exponents = exponents_of(raw, vectors, first, AXIS, o)
        there = tl.expand_dims(rows < left, AXIS)
        there &= tl.expand_dims(first + tl.arange(0, o.block_D) < o.D, 1 - AXIS)
        phi = tl.where(there, exponential(exponents - tl.expand_dims(level, AXIS)), 0.0)
    elif o.map != "none":
        phi = mapped(x, raw, rows, left, stride, AXIS, o, first)
    return phi


@triton.jit
def load_features(x, rows, left, first, stride, vectors, level, AXIS: tl.constexpr, o: tl.constexpr):
    """The same from memory, as an operand of products."""
    raw = load_entries(x, rows, left, first, stride, AXIS, o)
    return features(x, raw, rows, left, first, stride, vectors, level, AXIS, o).to(o.operand)


@triton.jit
def signs(first, o: tl.constexpr):
    """FAVOR+: 1 for the first half of all features, -1 for the second."""
    return tl.where(first + tl.arange(0, o.block_D) < o.vectors, 1.0, -1.0).to(o.acc)


@triton.jit
def load_vectors(vectors, first, AXIS: tl.constexpr, o: tl.constexpr):
    """FAVOR+'s vectors of `block_D` features from `first` on, (D, R), or (R, D) for AXIS 1."""
    j = tl.expand_dims(first + tl.arange(0, o.block_D), 1 - AXIS)
    r = tl.expand_dims(tl.arange(0, o.block_R), AXIS)
    return tl.load(vectors + j % o.vectors * o.R + r, (j < o.D) & (r < o.R), 0.0)


@triton.jit
def exponents_of(raw, vectors, first, AXIS: tl.constexpr, o: tl.constexpr):
    """FAVOR+'s r·x or -r·x of `block_D` features from `first` on, (C, D) or (D, C).

    What 16-bit operands leave of a vector is multiplied as well: an exponent needs digits after the point.
    """
    r = load_vectors(vectors, first, AXIS, o)
    rough = r
    if o.operand == tl.bfloat16:
        rough = r.to(tl.bfloat16).to(o.acc)
    elif o.precision == "tf32":
        rough = leading_digits(r)
    result = dot(raw, rough, o) if AXIS == 1 else dot(rough, raw, o)
    if o.operand == tl.bfloat16 or o.precision == "tf32":
        result += dot(raw, r - rough, o) if AXIS == 1 else dot(r - rough, raw, o)
    return result * tl.expand_dims(signs(first, o), 1 - AXIS)


@triton.jit
def level_of_keys(k, rows, left, stride, o: tl.constexpr):
    """FAVOR+: half of |x|² and the logarithm of sqrt(2 m), for x scaled as the vectors are."""
    level = tl.full(rows.shape, o.level, o.acc)
    if o.map == "favor":
        raw = load_raw(k, rows, left, stride, 1, o).to(o.acc)
        level += tl.sum(raw * raw, 1) * o.half_square
    return level


@triton.jit
def level_of_queries(q, rows, left, stride, vectors, o: tl.constexpr):
    """FAVOR+: the largest exponent of each query, with which no feature overflows. Reads do not depend on it."""
    level = tl.full(rows.shape, 0.0, o.acc)
    if o.map == "favor":
        raw = load_raw(q, rows, left, stride, 1, o)
        # The second half has the other sign.
        for first in range(0, o.vectors, o.block_D):
            level = tl.maximum(level, tl.max(tl.abs(exponents_of(raw, vectors, first, 1, o)), 1))
    return level


@triton.jit
def add_gradient(
    dx, dphi, x, dx_at, raw, rows, left, first, stride, last, vectors, level, KEYS: tl.constexpr, o: tl.constexpr
):
    """Gradient of raw heads, from that of `block_D` features (C, D) from `first` on, written for the first `last` rows.

    With `whole`, where a raw entry is part of many features, it is added to `dx`, which the caller writes; else it is
    written at `dx_at`, with 0 for rows that were not read.
    """
    if o.map == "favor":
        dphi *= features(x, raw, rows, left, first, stride, vectors, level, 1, o)
        sign = signs(first, o)[None, :]
        dx += dot(dphi * sign, load_vectors(vectors, first, 0, o), o)
        if KEYS:
            dx -= tl.sum(dphi, 1)[:, None] * raw.to(o.acc) * (2 * o.half_square)
    else:
        found = raw_gradient(dphi, rows, x, raw, rows, left, stride, 1, False, o, first)
        if o.whole:
            dx += found
        else:
            write_gradient(dx_at, found, rows, left, first + tl.arange(0, o.block_D), last, o)
    return dx


@triton.jit
def write_gradient(dx_at, found, rows, left, columns, last, o: tl.constexpr):
    """Write a tile (C, R) for the first `last` rows, with 0 for those that were not read."""
    found = tl.where((rows < left)[:, None], found, 0.0)
    store_rows(dx_at, found, tl.arange(0, o.C), last, columns, o.H * o.R, o.R)


@triton.jit
def reciprocal(total, o: tl.constexpr):
    """1 / total, and 0 where that is next to 0, as `normalization.safe_divide` has it."""
    tiny: tl.constexpr = 1.4916681462400413e-154 if tl.float64 == o.acc else 1.0842021724855044e-19
    empty = tl.abs(total) < tiny
    return tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
