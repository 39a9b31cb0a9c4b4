# mypy: disable-error-code="no-untyped-def, assignment"
"""What the kernels share: tiles, and the inverse of a chunk's triangular system.

Rows of a tile are named by its first index. C tokens make a chunk, `t` reads or writes later than `s`. The kernels hold
states value-major (M, D), so that a state is the left operand of every product it enters. Strides of q, k, v and dy
come in units of `o.unit` entries: the compiler can then load that many at once.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.common import exponential


@triton.jit
def dot(x, y, o: tl.constexpr):
    """x @ y with operands in `o.operand`, summed in float32 (float64 for float64)."""
    PRECISION: tl.constexpr = o.precision
    return product(x, y, o.operand, PRECISION)


@triton.jit
def product(x, y, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """As `dot`, with any operands and precision."""
    x = x.to(OPERAND)
    y = y.to(OPERAND)
    if PRECISION == "tf32x3":
        # Triton's own product of this name rounds to nearest in integers and looks for NaN: a third more instructions.
        rough_x = leading_digits(x)
        rough_y = leading_digits(y)
        result = tl.dot(x - rough_x, rough_y, input_precision="tf32")
        result = tl.dot(rough_x, y - rough_y, result, input_precision="tf32")
        result = tl.dot(rough_x, rough_y, result, input_precision="tf32")
    else:
        result = tl.dot(x, y, input_precision=PRECISION)
    return result


@triton.jit
def leading_digits(x):
    """The part of float32 that TF32 can hold; what is left has as many digits again, and 3 more that are lost."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def in_entries(strides, o: tl.constexpr):
    """The strides in entries: those of the gates, the last two, come so; those of q, k, v and dy in units."""
    IN_UNITS: tl.constexpr = len(strides) - 2
    entries = ()
    for i in tl.static_range(IN_UNITS):
        entries = entries + (strides[i] * o.unit,)  # noqa: RUF005
    gate_token, gate_head = strides[IN_UNITS:]
    return entries + (gate_token, gate_head)  # noqa: RUF005


@triton.jit
def sequence(n, T, cu_seqlens, C: tl.constexpr, o: tl.constexpr):
    """First token, length and first slot for C tokens of sequence n, or of a group of a sequence of T tokens."""
    if o.packed:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - first).to(tl.int32)
        # Rounding each start down and counting one slot more per sequence leaves room for every partial chunk.
        slot = first // C + n
        if o.grouped:
            # Groups begin where chunks do: theirs have the slots that they would have in sequences that are not cut.
            slot = first // T * tl.cdiv(T, C) + first % T // C
    else:
        first = n.to(tl.int64) * T
        length = T
        slot = n.to(tl.int64) * tl.cdiv(T, C)
    return first, length, slot


@triton.jit
def sequence_of(slot, N, cu_seqlens, C: tl.constexpr):
    """The packed sequence whose chunk may stand in `slot`: the last that starts at or before it."""
    low = tl.zeros((), tl.int32)
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle) // C + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def chunk_in(slot, N, T, cu_seqlens, o: tl.constexpr):
    """First token of the chunk that may stand in `slot`, and how many there are from there on: none, if none does."""
    n = sequence_of(slot, N, cu_seqlens, o.C) if o.packed else slot // tl.cdiv(T, o.C)
    first, length, first_slot = sequence(n, T, cu_seqlens, o.C, o)
    start = (slot - first_slot) * o.C
    return first + start, (length - start).to(tl.int32)


@triton.jit
def load_rows(x, rows, left, columns, stride, WIDTH: tl.constexpr):
    """Rows of a (tokens, WIDTH) matrix, zero past the last of `left` tokens and past WIDTH."""
    return tl.load(
        x + rows[:, None] * stride + columns[None, :], (rows[:, None] < left) & (columns[None, :] < WIDTH), 0.0
    )


@triton.jit
def load_columns(x, rows, left, columns, stride, WIDTH: tl.constexpr):
    """The same as a tile (WIDTH, tokens)."""
    return tl.load(
        x + rows[None, :] * stride + columns[:, None], (rows[None, :] < left) & (columns[:, None] < WIDTH), 0.0
    )


@triton.jit
def load_both(x, rows, left, columns, stride, WIDTH: tl.constexpr, BOTH_WAYS: tl.constexpr):
    """Rows of a matrix and their transpose; with `BOTH_WAYS` as two loads, else transposed on chip."""
    tile = load_rows(x, rows, left, columns, stride, WIDTH)
    tile_t = load_columns(x, rows, left, columns, stride, WIDTH) if BOTH_WAYS else tl.trans(tile)
    return tile, tile_t


@triton.jit
def load_transposed(x, rows, left, columns, stride, WIDTH: tl.constexpr, BOTH_WAYS: tl.constexpr):
    """The transpose alone; with `BOTH_WAYS` loaded as it is needed, else transposed on chip."""
    if BOTH_WAYS:
        tile = load_columns(x, rows, left, columns, stride, WIDTH)
    else:
        tile = tl.trans(load_rows(x, rows, left, columns, stride, WIDTH))
    return tile


@triton.jit
def load_again(
    tile,
    x,
    rows,
    left,
    columns,
    stride,
    AXIS: tl.constexpr,
    WIDTH: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """With `AGAIN` the `tile` of rows (C, WIDTH), or for AXIS 0 of columns (WIDTH, C), by a load of its own.

    Left and right operands of float32 lie differently in shared memory, so that one load for both is not copied ahead.
    """
    if AGAIN:
        row = tl.expand_dims(rows, AXIS)
        column = tl.expand_dims(columns, 1 - AXIS)
        # The mask of the first load the other way round: the compiler makes one of two loads that are the same.
        tile = tl.load(x + row * stride + column, (left > row) & (column < WIDTH), 0.0)
    return tile


@triton.jit
def load_by_product(x, rows, left, columns, stride, C: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The transpose (BLOCK, C) of rows of a matrix, in float32.

    By a product with the unit matrix, which is exact: 16-bit numbers are copied ahead only where products take them.
    """
    tile = load_columns(x, rows, left, columns, stride, WIDTH)
    N: tl.constexpr = C if C < BLOCK else BLOCK
    unit = tl.where(tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :], 1.0, 0.0).to(tile.dtype)
    return tl.dot(unit, tile, input_precision="ieee") if BLOCK <= C else tl.dot(tile, unit, input_precision="ieee")


@triton.jit
def load_gate(x, rows, left, stride, filler: tl.constexpr, o: tl.constexpr):
    """One gate of a chunk, or from logits; `filler` past the sequence's end, so that nothing changes there."""
    gate = tl.load(x + rows * stride, rows < left, filler).to(o.acc)
    if o.logits:
        gate = tl.where(rows < left, 1.0 / (1.0 + exponential(-gate)), filler)
    return gate


@triton.jit
def store_rows(x, tile, rows, left, columns, stride, WIDTH: tl.constexpr):
    """Write a tile (C, WIDTH) to rows of a (tokens, WIDTH) matrix."""
    where = x + rows[:, None] * stride + columns[None, :]
    tl.store(where, tile.to(x.dtype.element_ty), (rows[:, None] < left) & (columns[None, :] < WIDTH))


@triton.jit
def store_columns(x, tile, rows, left, columns, stride, WIDTH: tl.constexpr):
    """Write a tile (WIDTH, C) that stands transposed on chip to rows of a (tokens, WIDTH) matrix."""
    where = x + rows[None, :] * stride + columns[:, None]
    tl.store(where, tile.to(x.dtype.element_ty), (rows[None, :] < left) & (columns[:, None] < WIDTH))


@triton.jit
def resolvent(A, e, o: tl.constexpr):
    """Z = A (I + diag(e) A)^-1 = (I + A diag(e))^-1 A for a strictly upper triangular A (C, C), by doubling blocks.

        Z = solve_triangular(I + A * e, A, upper=True)

    No power of A is formed, so entries stay as small as those of the result. Only blocks on the diagonal are ever
    multiplied, as a batch, which spares the products with zeros between them.

    "16-bit" stands for float16 where A has been multiplied by e: it has the digits of TF32 and half its instructions,
    and its range is enough, since what the memory makes of one token at a later one stays small. A and Z themselves
    have the square of the keys' length, whatever e is: they enter as `o.operand`, in which Z is kept.
    """
    SOLVE: tl.constexpr = o.solve
    G: tl.constexpr = o.C // 16
    # Times -1.0, here and elsewhere: the compiler has to subtract -x from 0, but need not do anything for this.
    e *= -1.0
    Z = _first_blocks(_diagonal(A, G, 16), tl.reshape(e, (G, 16)) if G > 1 else e, G, o.operand, SOLVE)
    if o.C == 32:
        Z = _widened(Z, A, e, 1, 16, o.operand, SOLVE)
    elif o.C == 64:
        Z = _widened(Z, _diagonal(A, 2, 32), tl.reshape(e, (2, 32)), 2, 16, o.operand, SOLVE)
        Z = _widened(Z, A, e, 1, 32, o.operand, SOLVE)
    return Z


@triton.jit
def at_or_above(s, t):
    """Where blocks of width 16 of an upper triangle stand; the others are neither written nor read."""
    return (s // 16) <= (t // 16)


@triton.jit
def _solve_product(x, y, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x @ y, from `OPERAND` where products take 16 bits."""
    return product(x, y, OPERAND, "ieee") if PRECISION == "16-bit" else product(x, y, x.dtype, PRECISION)


@triton.jit
def _diagonal(A, G: tl.constexpr, WIDTH: tl.constexpr):
    """The blocks on the diagonal of A, (G, WIDTH, WIDTH); A itself for one."""
    if G > 1:
        own = tl.arange(0, G)[:, None, None, None] == tl.arange(0, G)[None, None, :, None]
        # Not 0.0: what is added to it may be -0.0, so that the compiler has to add.
        A = tl.sum(tl.where(own, tl.reshape(A, (G, WIDTH, G, WIDTH)), -0.0), 2)
    return A


@triton.jit
def _first_blocks(A, e, G: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Z for blocks of width 16: (G, 16, 16) with e (G, 16), or (16, 16) with (16,) for G = 1.

    With X = (I + A diag(e))^-1 for blocks of width b, and 0 between them, that of blocks of width 2b is
    X - X A diag(e) X where the halves of one meet. Where they do not, X A is Z. Here e has the other sign.
    """
    # The highest bit in which two positions differ tells the width at which they first share a block.
    apart = tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :]
    if G > 1:
        apart = apart[None, :, :]
    e = tl.expand_dims(e, -2)
    scaled = A * e
    X = tl.where(apart == 0, 1.0, tl.where(apart == 1, scaled, 0.0)).to(A.dtype)
    for bit in tl.static_range(1, 3):
        half = _solve_product(X, scaled, tl.float16, PRECISION)
        X += tl.where((apart >> bit) == 1, _solve_product(half, X, tl.float16, PRECISION), 0.0)
    Z = _solve_product(X, A, OPERAND, PRECISION)
    return Z + _solve_product(tl.where(apart < 8, 0.0, Z) * e, tl.where(apart < 8, Z, 0.0), OPERAND, PRECISION)


@triton.jit
def _widened(Z, A, e, G: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Z for G blocks of twice the WIDTH, given A and e for them, from Z for 2 G blocks; no batch for G = 1.

    Of A = [[A_1, B], [0, A_2]] it is [[Z_1, Z_B], [0, Z_2]] with Z_B = S - S diag(e_2) Z_2, S = B - Z_1 diag(e_1) B.
    Here e has the other sign.
    """
    half = tl.arange(0, 2)
    i = half[None, :, None, None, None]
    j = half[None, None, None, :, None]
    pair = tl.reshape(Z, (G, 2, 1, WIDTH, WIDTH))
    quarters = tl.reshape(A, (G, 2, WIDTH, 2, WIDTH))
    gates = tl.reshape(e, (G, 2, WIDTH))
    Z_1 = tl.sum(tl.where(half[None, :, None, None, None] == 0, pair, -0.0), 1)
    Z_2 = tl.sum(tl.where(half[None, :, None, None, None] == 1, pair, -0.0), 1)
    B = tl.sum(tl.sum(tl.where((i == 0) & (j == 1), quarters, -0.0), 3), 1)
    e_1 = tl.sum(tl.where(half[None, :, None] == 0, gates, -0.0), 1)
    e_2 = tl.sum(tl.where(half[None, :, None] == 1, gates, -0.0), 1)
    if G == 1:
        Z_1 = tl.reshape(Z_1, (WIDTH, WIDTH))
        Z_2 = tl.reshape(Z_2, (WIDTH, WIDTH))
        B = tl.reshape(B, (WIDTH, WIDTH))
        e_1 = tl.reshape(e_1, (WIDTH,))
        e_2 = tl.reshape(e_2, (WIDTH,))
    else:
        Z_1 = tl.reshape(Z_1, (G, WIDTH, WIDTH))
        Z_2 = tl.reshape(Z_2, (G, WIDTH, WIDTH))
    S = B + _solve_product(Z_1 * tl.expand_dims(e_1, -2), B, OPERAND, PRECISION)
    Z_B = S + _solve_product(S * tl.expand_dims(e_2, -2), Z_2, OPERAND, PRECISION)
    shape: tl.constexpr = (G, 1, WIDTH, 1, WIDTH)
    lower = tl.where(j == 1, tl.reshape(Z_2, shape), 0.0)
    upper = tl.where(j == 1, tl.reshape(Z_B, shape), tl.reshape(Z_1, shape))
    Z = tl.where(i == 1, lower, upper)
    return tl.reshape(Z, (2 * WIDTH, 2 * WIDTH)) if G == 1 else tl.reshape(Z, (G, 2 * WIDTH, 2 * WIDTH))
