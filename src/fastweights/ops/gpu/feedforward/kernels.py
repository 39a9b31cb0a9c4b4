# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the feed-forward layer: its wide middle is written once and read where it must be.

n tokens, K = d_model, F = d_ff. With K so small each product takes one step, and memory decides how long it takes. A
program has `tile` tokens and `span` times `step` entries of the middle.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a kernel is compiled for, `o` in the code: sizes, how the work is split, and dropout."""

    K: int
    F: int
    tile: int
    step: int
    span: int
    block_K: int
    scale: float
    threshold: int = 0
    acc: tl.dtype = tl.float32


@triton.jit
def tile_of(x, rows, columns, HEIGHT, WIDTH: tl.constexpr):
    """Load x[rows, columns] of a matrix (HEIGHT, WIDTH), zero outside of it."""
    there = (rows[:, None] < HEIGHT) & (columns[None, :] < WIDTH)
    return tl.load(x + rows[:, None] * WIDTH + columns[None, :], there, 0.0)


@triton.jit
def survives_dropout(seed, rows, columns, o: tl.constexpr):
    """Return which entries (row, column) dropout keeps: a hash of their number, keyed twice, is at least the threshold.

    Three rounds of multiplication, whose upper bits hang on all below them. The rounds of a cipher, as torch draws its
    numbers with, would take longer than the product beside it.
    """
    first = tl.load(seed).to(tl.uint32)
    second = tl.load(seed + 1).to(tl.uint32)
    down = rows.to(tl.uint32) * o.F * 0x9E3779B1 + first
    h = down[:, None] + (columns.to(tl.uint32) * 0x9E3779B1)[None, :]
    h = (h ^ (h >> 16)) * 0x7FEB352D + second
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h >= o.threshold


@triton.jit
def widen(
    x,  # (n, K)
    weight,  # (F, K)
    bias,  # (F,)
    seed,  # (2,)
    middle,  # (n, F)
    n,
    o: tl.constexpr,
):
    """Compute the middle.

    h = relu(x @ weight.T + bias)
    middle = torch.where(survives_dropout, h * scale, 0)           # scale = 1 / (1 - p)
    """
    across = tl.cdiv(o.F, o.step * o.span)
    rows = tl.program_id(0) // across * o.tile + tl.arange(0, o.tile)
    first = tl.program_id(0) % across * (o.step * o.span)
    inner = tl.arange(0, o.block_K)
    own = tile_of(x, rows, inner, n, o.K)
    for start in range(first, first + o.step * o.span, o.step):
        columns = start + tl.arange(0, o.step)
        b = tl.load(bias + columns, columns < o.F, 0.0).to(o.acc)
        w = tile_of(weight, columns, inner, o.F, o.K)
        h = tl.dot(own, tl.trans(w), input_precision="ieee") + b[None, :]
        # Not maximum, which would make 0 of NaN.
        h = tl.where(h < 0, 0.0, h)
        if o.threshold > 0:
            h = tl.where(survives_dropout(seed, rows, columns, o), h * o.scale, 0.0)
        there = (rows[:, None] < n) & (columns[None, :] < o.F)
        tl.store(middle + rows[:, None] * o.F + columns[None, :], h.to(middle.dtype.element_ty), there)


@triton.jit
def widen_gradient(
    dy,  # (n, K)
    weight,  # (K, F) of the layer after it
    middle,  # (n, F) what `widen` wrote
    d_middle,  # (n, F)
    d_bias,  # (tiles, F) sums over the rows of a tile
    n,
    o: tl.constexpr,
):
    """Compute the gradient of x W^T + b: an entry that is not 0 was neither cut off by relu nor dropped.

    d_middle = torch.where(middle != 0, (dy @ weight) * scale, 0)
    d_bias = d_middle.sum(0)                                       # one sum per tile of tokens
    """
    across = tl.cdiv(o.F, o.step * o.span)
    tile = tl.program_id(0) // across
    rows = tile * o.tile + tl.arange(0, o.tile)
    first = tl.program_id(0) % across * (o.step * o.span)
    inner = tl.arange(0, o.block_K)
    own = tile_of(dy, rows, inner, n, o.K)
    for start in range(first, first + o.step * o.span, o.step):
        columns = start + tl.arange(0, o.step)
        product = tl.dot(own, tile_of(weight, inner, columns, o.K, o.F), input_precision="ieee")
        d = tl.where(tile_of(middle, rows, columns, n, o.F) != 0, product * o.scale, 0.0)
        there = (rows[:, None] < n) & (columns[None, :] < o.F)
        tl.store(d_middle + rows[:, None] * o.F + columns[None, :], d.to(d_middle.dtype.element_ty), there)
        tl.store(d_bias + tile * o.F + columns, tl.sum(d, 0), columns < o.F)
