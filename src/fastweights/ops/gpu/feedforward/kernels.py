# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the feed-forward layer: its wide middle is written once and read where it must be.

n tokens, K = d_model, F = d_ff. With K so small each product takes one step, and memory decides how long it takes. A
program has TILE tokens and SPAN times STEP entries of the middle.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(x, rows, columns, HEIGHT, WIDTH: tl.constexpr):
    """Load x[rows, columns] of a matrix (HEIGHT, WIDTH), zero outside of it."""
    there = (rows[:, None] < HEIGHT) & (columns[None, :] < WIDTH)
    return tl.load(x + rows[:, None] * WIDTH + columns[None, :], there, 0.0)


@triton.jit
def survives_dropout(seed, rows, columns, F: tl.constexpr, THRESHOLD: tl.constexpr):
    """Return which entries (row, column) dropout keeps: a hash of their number, keyed twice, is at least the threshold.

    Three rounds of multiplication, whose upper bits hang on all below them. The rounds of a cipher, as torch draws its
    numbers with, would take longer than the product beside it.
    """
    first = tl.load(seed).to(tl.uint32)
    second = tl.load(seed + 1).to(tl.uint32)
    down = rows.to(tl.uint32) * F * 0x9E3779B1 + first
    h = down[:, None] + (columns.to(tl.uint32) * 0x9E3779B1)[None, :]
    h = (h ^ (h >> 16)) * 0x7FEB352D + second
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h >= THRESHOLD


@triton.jit
def widen(
    x,  # (n, K)
    weight,  # (F, K)
    bias,  # (F,)
    seed,  # (2,)
    middle,  # (n, F)
    n,
    K: tl.constexpr,
    F: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute the middle.

    h = relu(x @ weight.T + bias)
    middle = torch.where(survives_dropout, h * SCALE, 0)           # SCALE = 1 / (1 - p)
    """
    across = tl.cdiv(F, STEP * SPAN)
    rows = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    first = tl.program_id(0) % across * (STEP * SPAN)
    inner = tl.arange(0, BLOCK_K)
    own = tile_of(x, rows, inner, n, K)
    for start in range(first, first + STEP * SPAN, STEP):
        columns = start + tl.arange(0, STEP)
        b = tl.load(bias + columns, columns < F, 0.0).to(ACC)
        w = tile_of(weight, columns, inner, F, K)
        h = tl.dot(own, tl.trans(w), input_precision="ieee") + b[None, :]
        # Not maximum, which would make 0 of NaN.
        h = tl.where(h < 0, 0.0, h)
        if THRESHOLD > 0:
            h = tl.where(survives_dropout(seed, rows, columns, F, THRESHOLD), h * SCALE, 0.0)
        there = (rows[:, None] < n) & (columns[None, :] < F)
        tl.store(middle + rows[:, None] * F + columns[None, :], h.to(middle.dtype.element_ty), there)


@triton.jit
def widen_gradient(
    dy,  # (n, K)
    weight,  # (K, F) of the layer after it
    middle,  # (n, F) what `widen` wrote
    d_middle,  # (n, F)
    d_bias,  # (tiles, F) sums over the rows of a tile
    n,
    K: tl.constexpr,
    F: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Compute the gradient of x W^T + b: an entry that is not 0 was neither cut off by relu nor dropped.

    d_middle = torch.where(middle != 0, (dy @ weight) * SCALE, 0)
    d_bias = d_middle.sum(0)                                       # one sum per tile of tokens
    """
    across = tl.cdiv(F, STEP * SPAN)
    tile = tl.program_id(0) // across
    rows = tile * TILE + tl.arange(0, TILE)
    first = tl.program_id(0) % across * (STEP * SPAN)
    inner = tl.arange(0, BLOCK_K)
    own = tile_of(dy, rows, inner, n, K)
    for start in range(first, first + STEP * SPAN, STEP):
        columns = start + tl.arange(0, STEP)
        product = tl.dot(own, tile_of(weight, inner, columns, K, F), input_precision="ieee")
        d = tl.where(tile_of(middle, rows, columns, n, F) != 0, product * SCALE, 0.0)
        there = (rows[:, None] < n) & (columns[None, :] < F)
        tl.store(d_middle + rows[:, None] * F + columns[None, :], d.to(d_middle.dtype.element_ty), there)
        tl.store(d_bias + tile * F + columns, tl.sum(d, 0), columns < F)
