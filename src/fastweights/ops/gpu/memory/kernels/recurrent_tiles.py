# mypy: disable-error-code="no-untyped-def"
"""What the walks token by token share.

They are for float32, where a tensor-core product takes three instructions for one: up to 32 x 32 a walk by chunks has
more instructions, and waits longer for each, than the recurrence itself. They are written in Gluon, the part of Triton
in which layouts are chosen by hand: one warp has a state, and a few of its lanes share what it holds of one value, so
that recalling and reading are sums inside a lane and one or two shuffles. Tokens are copied ahead into shared memory.

Arguments are those of the walks by chunks, so that they are launched alike; some are not used.
"""

import triton.language as tl

from fastweights.ops.gpu.memory.kernels.gluon import async_copy, constexpr_function, gl, jit


@constexpr_function
def state_layout(BLOCK_M, BLOCK_D, LANES, WARPS, ENTRIES):
    """A state (M, D): warps split its rows, every `LANES` lanes hold some of them, `ENTRIES` each in turn."""
    rows = 32 // LANES
    return gl.BlockedLayout([BLOCK_M // (rows * WARPS), ENTRIES], [rows, LANES], [WARPS, 1], [1, 0])


@constexpr_function
def tile_layout(WIDTH, WARPS):
    """Rows of a tile, four entries a lane."""
    entries = min(4, WIDTH)
    return gl.BlockedLayout([1, entries], [32 * entries // WIDTH, WIDTH // entries], [WARPS, 1], [1, 0])


@jit
def copy_ahead(tiles, stage, x, start, length, stride, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """Begin to copy rows of a (tokens, WIDTH) matrix; zeros before the first and past the last, and past WIDTH."""
    C: tl.constexpr = tiles.shape[1]
    BLOCK: tl.constexpr = tiles.shape[2]
    layout: tl.constexpr = tile_layout(BLOCK, WARPS)
    rows = start + gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    there = (rows >= 0) & (rows < length) & (columns < WIDTH)
    # Within 32 bits: `Plan.layout` and `variants.WIDEST` see to that.
    async_copy.async_copy_global_to_shared(tiles.index(stage), x + rows * stride + columns, there)


@jit
def row(tile, t: tl.constexpr, layout: tl.constexpr):
    """One token of a tile (C, ·) as (1, ·)."""
    return tile.slice(t, 1, 0).load(layout)


@jit
def column(tile, t: tl.constexpr, layout: tl.constexpr):
    """One token of a tile (C, ·) as (·, 1)."""
    return tile.slice(t, 1, 0).permute([1, 0]).load(layout)
