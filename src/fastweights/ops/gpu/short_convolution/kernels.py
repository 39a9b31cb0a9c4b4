# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: RUF005 (Triton knows no other way to lengthen a tuple)
"""Triton kernels of the short convolution: inputs are read once, outputs written once, whatever texts there are.

A program has some channels of a stretch of time and goes through it in blocks of tokens, whose inputs it holds in
registers: nothing is summed across threads. Where a block and all it sees lie within one text, they are loaded as they
stand; elsewhere each token finds out by itself which text it is in. Nothing is multiplied by 0 to be left out, so what
is NaN in one text does not reach another.

B rows of T tokens have C channels, or one row has N sequences between `bounds`; `reach` is taps - 1. `x_rows` and
`dy_rows` count tokens from a row to the next.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.common import sigmoid
from fastweights.ops.gpu.short_convolution.texts import is_start, limits_of, sees_one_text, sequence_of, text_at


@triton.jit
def row_at(x, t, c, ROW: tl.constexpr):
    """Return where channels c are at time t, with ROW entries from one time to the next."""
    return x + t.to(tl.int64) * ROW + c


@triton.jit
def rows_at(x, count: tl.constexpr, there, ROW: tl.constexpr):
    """Load some channels of `count` tokens, with those of the first one at x."""
    rows = ()
    for i in tl.static_range(count):
        rows = rows + (tl.load(x + i * ROW, there, 0.0),)
    return rows


@triton.jit
def inputs_of(x, recent, t, n, age, continues, there, c, o: tl.constexpr):
    """Return what the taps of token t see, the newest first: inputs of its text, what is carried in, then zeros."""
    TAPS: tl.constexpr = o.taps
    REACH: tl.constexpr = o.taps - 1
    seen = ()
    for j in tl.static_range(TAPS):
        value = tl.load(row_at(x, t - j, c, o.x_row), there & (j <= age), 0.0)
        if recent is not None:
            place = n * REACH + REACH + age - j
            before = tl.load(row_at(recent, place, c, o.C), there & continues & (j > age), 0.0)
            value = tl.where(j <= age, value, before)
        seen = seen + (value.to(o.acc),)
    return seen


@triton.jit
def inputs_in(rows, last: tl.constexpr, o: tl.constexpr):
    """Return what the taps of the token of rows[last] see, the newest first, where all of it is in `rows`."""
    TAPS: tl.constexpr = o.taps
    seen = ()
    for j in tl.static_range(TAPS):
        seen = seen + (rows[last - j].to(o.acc),)
    return seen


@triton.jit
def parameters_of(weight, bias, there, c, o: tl.constexpr):
    """Return the weight of each tap, and the bias."""
    TAPS: tl.constexpr = o.taps
    weights = ()
    for j in tl.static_range(TAPS):
        weights = weights + (tl.load(weight + c * TAPS + j, there, 0.0).to(o.acc),)
    shift = tl.full((o.channels,), 0.0, o.acc)
    if bias is not None:
        shift += tl.load(bias + c, there, 0.0).to(o.acc)
    return weights, shift


@triton.jit
def weighted(seen, weights, shift, o: tl.constexpr):
    """Return the sum over taps, before SiLU."""
    TAPS: tl.constexpr = o.taps
    z = shift
    for j in tl.static_range(TAPS):
        z += weights[j] * seen[j]
    return z


@triton.jit
def activated(z, o: tl.constexpr):
    """silu(z), where SiLU is asked for."""
    if o.silu:
        z = z * sigmoid(z)
    return z


@triton.jit
def gradient_before_silu(dy, z, o: tl.constexpr):
    """The gradient of z, from that of silu(z)."""
    if o.silu:
        s = sigmoid(z)
        dy = dy * (s + z * s * (1.0 - s))
    return dy


@triton.jit
def place_of_program(T, N, o: tl.constexpr):
    """Return the tile of a program, or its sequence, numbered after all tiles; its channels; how many tiles there are.

    Tiles are counted twice: those of a row, and all of them.
    """
    groups: tl.constexpr = (o.C + o.channels - 1) // o.channels
    unit = tl.program_id(0) // groups
    c = tl.program_id(0) % groups * o.channels + tl.arange(0, o.channels)
    there = c < o.C
    tiles = tl.cdiv(T, o.tile)
    return unit, c, there, tiles, tiles if o.packed else N * tiles


@triton.jit(do_not_specialize=["T", "N", "x_rows"])
def convolve(
    inputs,  # x (B, T, C), weight (C, taps), bias (C,), recent (N, reach, C), bounds (N + 1,), starts (B, T); the last
    # four may be None
    y,  # (B, T, C)
    recent_end,  # (N, reach, C)
    T,
    N,  # B unless packed
    x_rows,
    o: tl.constexpr,
):
    """Compute y for a tile of tokens, or, in the programs after those, what one sequence carries on.

    z_t = bias + sum(weight[:, j] * x[t - j] for j in range(taps))  # x before a text: recent, or zeros
    y_t = silu(z_t)
    recent_end = torch.cat([recent, x])[-reach:]                    # of the last text of the sequence
    """
    REACH: tl.constexpr = o.taps - 1
    BLOCK: tl.constexpr = o.block
    x, weight, bias, recent, bounds, starts = inputs
    unit, c, there, tiles, stretches = place_of_program(T, N, o)
    if unit < stretches:
        row = unit // tiles
        first = unit % tiles * o.tile
        x += row.to(tl.int64) * x_rows * o.x_row
        y += row.to(tl.int64) * T * o.C
        weights, shift = parameters_of(weight, bias, there, c, o)
        start, end = first, first
        for step in range(0, tl.minimum(o.tile, T - first), BLOCK):
            t = first + step
            if t >= end:
                _, start, end = sequence_of(bounds, row, t, T, N, o)
            if sees_one_text(starts, row, t, start, end, T, o):
                rows = rows_at(row_at(x, t - REACH, c, o.x_row), BLOCK + REACH, there, o.x_row)
                out = row_at(y, t, c, o.C)
                for i in tl.static_range(BLOCK):
                    z = weighted(inputs_in(rows, i + REACH, o), weights, shift, o)
                    tl.store(out + i * o.C, activated(z, o).to(y.dtype.element_ty), there)
            else:
                for i in range(BLOCK):
                    at = t + i
                    n, _, age, continues = text_at(starts, bounds, row, at, T, N, o)
                    z = weighted(inputs_of(x, recent, at, n, age, continues, there, c, o), weights, shift, o)
                    z = tl.where(age >= 0, activated(z, o), 0.0)
                    tl.store(row_at(y, at, c, o.C), z.to(y.dtype.element_ty), there & (at < T))
    else:
        carry_on(x, recent, bounds, starts, recent_end, unit - stretches, T, x_rows, c, there, o)


@triton.jit
def carry_on(x, recent, bounds, starts, recent_end, n, T, x_rows, c, there, o: tl.constexpr):
    """Store the last inputs of a sequence: those of its last text, before which there may be what was carried in."""
    REACH: tl.constexpr = o.taps - 1
    row, start, end = limits_of(bounds, n, T, o)
    x += row.to(tl.int64) * x_rows * o.x_row
    continues = n >= 0
    for back in range(1, REACH + 1):
        t = end - back
        value = tl.load(row_at(x, t, c, o.x_row), there & continues & (t >= start), 0.0)
        place = n * REACH + REACH - back
        if recent is not None:
            before = tl.load(row_at(recent, place + end - start, c, o.C), there & continues & (t < start), 0.0)
            value = tl.where(t >= start, value, before)
        tl.store(row_at(recent_end, place, c, o.C), value, there)
        if starts is not None:
            continues = continues & ~is_start(starts, row, t, T, t >= start)


@triton.jit(do_not_specialize=["T", "N", "x_rows", "dy_rows"])
def convolve_gradients(
    dy,  # (B, T, C)
    d_recent_end,  # (N, reach, C) or None
    inputs,  # as `convolve` takes them
    dx,  # (B, T, C)
    d_recent,  # (N, reach, C) or None
    parts,  # (tiles, taps, C), or with a bias (tiles, taps + 1, C): sums over the tokens of a tile
    T,
    N,  # B unless packed
    x_rows,
    dy_rows,
    o: tl.constexpr,
):
    """Compute dx and its part of the weight's gradient for a tile, or, in the programs after those, `d_recent`.

    dz_t = dy_t * (s + z_t * s * (1 - s))                           # s = sigmoid(z_t)
    dx_s = sum(weight[:, j] * dz[s + j] for j in range(taps))       # where token s + j sees s
    parts[:, j] = sum(dz_t * x[t - j] for t in tile)
    parts[:, taps] = sum(dz_t for t in tile)                        # the gradient of the bias

    Tokens come one after the other. A ring of `taps` sums has the gradients of the inputs that the last token saw, the
    newest first; what is older is complete and stored. Tokens after the tile only add to those that are not.
    """
    TAPS: tl.constexpr = o.taps
    REACH: tl.constexpr = o.taps - 1
    BLOCK: tl.constexpr = o.block
    x, weight, bias, recent, bounds, starts = inputs
    unit, c, there, tiles, stretches = place_of_program(T, N, o)
    weights, shift = parameters_of(weight, bias, there, c, o)
    tokens = (dy, d_recent_end, x, recent, bounds, starts)
    sizes = (T, N, x_rows, dy_rows)
    if unit < stretches:
        row = unit // tiles
        first = unit % tiles * o.tile
        last = tl.minimum(first + o.tile, T)
        sums, ring = zeros(TAPS + 1, o), zeros(TAPS, o)
        start, end = first, first
        for step in range(0, last - first, BLOCK):
            t = first + step
            if t >= end:
                _, start, end = sequence_of(bounds, row, t, T, N, o)
            # Where the next segment's gradient enters, tokens are taken one by one.
            enters = 0 if d_recent_end is None else REACH
            if sees_one_text(starts, row, t, start, end - enters, T, o):
                sums, ring = tokens_within(tokens, dx, first, row, t, weights, shift, sums, ring, sizes, c, there, o)
            else:
                count = tl.minimum(last - t, BLOCK)
                walked = (dx, first, row, t, count)
                sums, ring = tokens_across(tokens, walked, weights, shift, sums, ring, sizes, c, there, o)
        walked = (dx, first, row, last, REACH)
        tokens_across(tokens, walked, weights, shift, zeros(TAPS + 1, o), ring, sizes, c, there, o)
        kinds: tl.constexpr = TAPS + (bias is not None)
        for j in tl.static_range(kinds):
            tl.store(row_at(parts, unit * kinds + j, c, o.C), sums[j], there)
    elif d_recent is not None:
        gradients_of_carried(tokens, d_recent, weights, shift, unit - stretches, sizes, c, there, o)


@triton.jit
def zeros(n: tl.constexpr, o: tl.constexpr):
    """Return n empty sums."""
    sums = ()
    for _ in tl.static_range(n):
        sums = sums + (tl.full((o.channels,), 0.0, o.acc),)
    return sums


@triton.jit
def with_token(sums, seen, slope, o: tl.constexpr):
    """Return the gradients of weight and bias with those of one token."""
    TAPS: tl.constexpr = o.taps
    grown = ()
    for j in tl.static_range(TAPS):
        grown = grown + (sums[j] + seen[j] * slope,)
    return grown + (sums[TAPS] + slope,)


@triton.jit
def ring_after(ring, newest, weights, slope, age, o: tl.constexpr):
    """Return the ring after a token whose own input has the gradient `newest` so far, None for 0.

    It did not see inputs older than `age`, unless that is None.
    """
    TAPS: tl.constexpr = o.taps
    moved = ()
    for j in tl.static_range(TAPS):
        part = weights[j] * slope
        if age is not None:
            part = tl.where(age >= j, part, 0.0)
        if j > 0:
            part += ring[j - 1]
        elif newest is not None:
            part += newest
        moved = moved + (part,)
    return moved


@triton.jit
def tokens_within(tokens, dx, first, row, t, weights, shift, sums, ring, sizes, c, there, o: tl.constexpr):
    """Take a block of tokens that see one text."""
    REACH: tl.constexpr = o.taps - 1
    BLOCK: tl.constexpr = o.block
    dy, _, x, _, _, _ = tokens
    T, _, x_rows, dy_rows = sizes
    dy += row.to(tl.int64) * dy_rows * o.dy_row
    x += row.to(tl.int64) * x_rows * o.x_row
    dx += row.to(tl.int64) * T * o.C
    rows = rows_at(row_at(x, t - REACH, c, o.x_row), BLOCK + REACH, there, o.x_row)
    slopes = rows_at(row_at(dy, t, c, o.dy_row), BLOCK, there, o.dy_row)
    out = row_at(dx, t - REACH, c, o.C)
    for i in tl.static_range(BLOCK):
        seen = inputs_in(rows, i + REACH, o)
        slope = gradient_before_silu(slopes[i].to(o.acc), weighted(seen, weights, shift, o), o)
        sums = with_token(sums, seen, slope, o)
        ring = ring_after(ring, None, weights, slope, None, o)
        own = there
        if i < REACH:
            own = there & (t - REACH + i >= first)
        tl.store(out + i * o.C, ring[REACH].to(dx.dtype.element_ty), own)
    return sums, ring


@triton.jit
def tokens_across(tokens, walked, weights, shift, sums, ring, sizes, c, there, o: tl.constexpr):
    """Take tokens each of which finds out what it sees."""
    REACH: tl.constexpr = o.taps - 1
    dy, d_recent_end, x, recent, bounds, starts = tokens
    dx, first, row, t, count = walked
    T, N, x_rows, dy_rows = sizes
    dy += row.to(tl.int64) * dy_rows * o.dy_row
    x += row.to(tl.int64) * x_rows * o.x_row
    dx += row.to(tl.int64) * T * o.C
    for i in range(count):
        at = t + i
        n, end, age, continues = text_at(starts, bounds, row, at, T, N, o)
        slope = tl.load(row_at(dy, at, c, o.dy_row), there & (age >= 0), 0.0).to(o.acc)
        seen = inputs_of(x, recent, at, n, age, continues, there, c, o)
        slope = gradient_before_silu(slope, weighted(seen, weights, shift, o), o)
        sums = with_token(sums, seen, slope, o)
        newest = tl.full((o.channels,), 0.0, o.acc)
        if d_recent_end is not None:
            # Its input is carried on, unless a text begins after it.
            place = at - end + REACH
            carried = (age >= 0) & (place >= 0)
            if starts is not None:
                for j in tl.static_range(1, REACH):
                    carried = carried & ~is_start(starts, row, at + j, T, carried & (at + j < end))
            newest += tl.load(row_at(d_recent_end, n * REACH + place, c, o.C), there & carried, 0.0).to(o.acc)
        ring = ring_after(ring, newest, weights, slope, age, o)
        done = there & (at - REACH >= first) & (at - REACH < T)
        tl.store(row_at(dx, at - REACH, c, o.C), ring[REACH].to(dx.dtype.element_ty), done)
    return sums, ring


@triton.jit
def gradients_of_carried(tokens, d_recent, weights, shift, n, sizes, c, there, o: tl.constexpr):
    """Store the gradient of what is carried into a sequence: its first tokens see it, or it is carried on."""
    TAPS: tl.constexpr = o.taps
    REACH: tl.constexpr = o.taps - 1
    dy, d_recent_end, x, recent, bounds, starts = tokens
    T, N, x_rows, dy_rows = sizes
    row, start, end = limits_of(bounds, n, T, o)
    dy += row.to(tl.int64) * dy_rows * o.dy_row
    x += row.to(tl.int64) * x_rows * o.x_row
    ring = zeros(TAPS, o)
    passes = n >= 0
    for i in range(REACH):
        at = start + i
        _, _, age, continues = text_at(starts, bounds, row, at, T, N, o)
        passes = passes & (continues | (at >= end))
        sees = continues & (at < end)
        slope = tl.load(row_at(dy, at, c, o.dy_row), there & sees, 0.0).to(o.acc)
        seen = inputs_of(x, recent, at, n, tl.where(sees, age, -1), sees, there, c, o)
        slope = gradient_before_silu(slope, weighted(seen, weights, shift, o), o)
        ring = ring_after(ring, None, weights, slope, tl.where(sees, REACH, -1), o)
        found = ring[REACH]
        if d_recent_end is not None:
            carried = there & passes & (at >= end)
            found += tl.load(row_at(d_recent_end, n * REACH + at - end, c, o.C), carried, 0.0).to(o.acc)
        tl.store(row_at(d_recent, n * REACH + i, c, o.C), found.to(d_recent.dtype.element_ty), there)
