# mypy: disable-error-code="no-untyped-def"
"""What the kernels of linear attention share: their options, where a head lies, and features of raw heads by blocks.

B sequences, T queries and S keys of H heads; a head has R entries before the map, D features after it, and values of
size M. Kernels take C tokens and `block_D` features at a time. Maps and products are those of the memory's kernels;
FAVOR+, whose random vectors have to be read, is only known here.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fastweights.ops.gpu.common import exponential
from fastweights.ops.gpu.memory.kernels.maps import load_raw, mapped, raw_gradient
from fastweights.ops.gpu.memory.kernels.options import TileOptions
from fastweights.ops.gpu.memory.kernels.tiles import dot, leading_digits, store_rows


@dataclass(frozen=True, kw_only=True)
class Options(TileOptions):
    """What a kernel of linear attention is compiled for."""

    masked: bool = False
    """There is a mask of the keys."""
    centred: bool = False
    """The memory is W - z c^T, and c is added to what is read."""
    whole: bool = False
    """Every feature may depend on any entry of a raw head (DPFP, FAVOR+), so all of a head are loaded at once."""
    vectors: int = 0
    """FAVOR+: m random vectors r make the features exp(r·x - level) and exp(-r·x - level)."""
    half_square: float = 0.0
    """FAVOR+: the level of a key is this times |x|², and `level` more."""
    level: float = 0.0


@triton.jit
def of_head(x, head, tokens, token_stride, head_stride, o: tl.constexpr):
    """Return where the first token of a head is, `head` counting those of all sequences, which have `tokens` each."""
    return x + (head // o.H) * tokens * token_stride + (head % o.H) * head_stride


@triton.jit
def keys_of_head(keys, head, S, strides, o: tl.constexpr):
    """Return where the keys and the values of a head begin, with their token strides, and the mask of all sequences."""
    k, v, mask = keys
    k_token, k_head, v_token, v_head = strides
    k = of_head(k, head, S, k_token, k_head, o)
    v = of_head(v, head, S, v_token, v_head, o)
    return k, v, k_token, v_token, mask


@triton.jit
def tile_of_program(tokens, o: tl.constexpr):
    """Return the head of a program that takes one tile of C tokens, and the first token of that tile."""
    tiles = tl.cdiv(tokens, o.C)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * o.C


@triton.jit
def present(mask, head, start, S, left, o: tl.constexpr):
    """Number C keys of a head from `start` on. A masked key gets the number `left`, so that nothing of it is read."""
    rows = tl.arange(0, o.C)
    if o.masked:
        there = tl.load(mask + (head // o.H) * S + start + rows, rows < left, 0)
        rows = tl.where(there != 0, rows, left)
    return rows


@triton.jit
def load_entries(x, rows, left, first, stride, AXIS: tl.constexpr, o: tl.constexpr):
    """Load the entries that `block_D` features from `first` on are computed from, (C, R) or (R, C)."""
    return load_raw(x, rows, left, stride, AXIS, o, 0 if o.whole else first)


@triton.jit
def features(x, raw, rows, left, first, stride, vectors, level, AXIS: tl.constexpr, o: tl.constexpr):
    """Compute `block_D` features from `first` on of the heads whose entries `load_entries` gave, (C, D) or (D, C).

    `level` (C,) is that of FAVOR+; other maps do not use it.
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
    """Compute the same from memory, as an operand of products."""
    raw = load_entries(x, rows, left, first, stride, AXIS, o)
    return features(x, raw, rows, left, first, stride, vectors, level, AXIS, o).to(o.operand)


@triton.jit
def signs(first, o: tl.constexpr):
    """FAVOR+: 1 for the first half of all features, -1 for the second."""
    return tl.where(first + tl.arange(0, o.block_D) < o.vectors, 1.0, -1.0).to(o.acc)


@triton.jit
def load_vectors(vectors, first, AXIS: tl.constexpr, o: tl.constexpr):
    """FAVOR+: load the vectors of `block_D` features from `first` on, (D, R), or (R, D) for AXIS 1."""
    j = tl.expand_dims(first + tl.arange(0, o.block_D), 1 - AXIS)
    r = tl.expand_dims(tl.arange(0, o.block_R), AXIS)
    return tl.load(vectors + j % o.vectors * o.R + r, (j < o.D) & (r < o.R), 0.0)


@triton.jit
def exponents_of(raw, vectors, first, AXIS: tl.constexpr, o: tl.constexpr):
    """FAVOR+: compute r·x or -r·x of `block_D` features from `first` on, (C, D) or (D, C).

    The part of a vector that a 16-bit operand has no digits for is multiplied as well: exponents need digits after the
    point.
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
    """Go back from the gradient of `block_D` features (C, D) from `first` on to that of raw heads.

    With `whole`, where an entry is part of many features, it is added to `dx`, which the caller writes in the end. Else
    it is written at `dx_at` for the first `last` rows, with 0 for those that were not read.
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
