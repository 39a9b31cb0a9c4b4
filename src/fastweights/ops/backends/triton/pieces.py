# mypy: disable-error-code="no-untyped-def"
"""What the kernels share: tiles, decay products, and the inverse of a chunk's triangular system.

Rows of a tile are named by its first index. C tokens make a chunk, `t` reads or writes later than `s`. The kernels hold
states value-major (M, D), so that a state is the left operand of every product it enters.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(x, y):
    return x * y


@triton.jit
def dot(x, y, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x @ y with operands in `OPERAND`, summed in float32 (float64 for float64)."""
    return tl.dot(x.to(OPERAND), y.to(OPERAND), input_precision=PRECISION)


@triton.jit
def fine_dot(x, y, OPERAND: tl.constexpr, PRECISION: tl.constexpr, LEFT: tl.constexpr, CAREFUL: tl.constexpr):
    """x @ y; with `CAREFUL` the `LEFT` or the right operand in two parts, so that twice as many of its digits count."""
    if CAREFUL:
        if LEFT:
            rough = x.to(OPERAND)
            rest = x.to(tl.float32) - rough.to(tl.float32)
            result = dot(rough, y, OPERAND, PRECISION) + dot(rest, y, OPERAND, PRECISION)
        else:
            rough = y.to(OPERAND)
            rest = y.to(tl.float32) - rough.to(tl.float32)
            result = dot(x, rough, OPERAND, PRECISION) + dot(x, rest, OPERAND, PRECISION)
    else:
        result = dot(x, y, OPERAND, PRECISION)
    return result


@triton.jit
def sequence(n, T, cu_seqlens, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, length and first chunk slot of sequence n."""
    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - first).to(tl.int32)
        # Rounding each start down and counting one slot more per sequence leaves room for every partial chunk.
        slot = first // C + n
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
def load_rows(x, rows, left, columns, stride, WIDTH: tl.constexpr):
    """Rows of a (tokens, WIDTH) matrix, zero past the last of `left` tokens and past WIDTH."""
    return tl.load(
        x + rows[:, None] * stride + columns[None, :], (rows[:, None] < left) & (columns[None, :] < WIDTH), 0.0
    )


@triton.jit
def load_gate(x, rows, left, stride, filler: tl.constexpr, LOGITS: tl.constexpr, ACC: tl.constexpr):
    """One gate of a chunk, or from `LOGITS`; `filler` past the sequence's end, so that nothing changes there."""
    gate = tl.load(x + rows * stride, rows < left, filler).to(ACC)
    if LOGITS:
        gate = tl.where(rows < left, 1.0 / (1.0 + tl.exp(-gate)), filler)
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
def reach_of(a, C: tl.constexpr):
    """Γ[t, s] = a_{s+1} ⋯ a_t for s <= t, else 0.

    A running product, not an exponent of a sum of logarithms: exact for a gate that closes (a = 0) and for any sign.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    return tl.where(t >= s, tl.associative_scan(tl.where(t > s, a[:, None], 1.0), 0, multiply), 0.0)


@triton.jit
def reach_transposed(a, C: tl.constexpr):
    """Γ[t, s] as a tile of rows s."""
    s = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    return tl.where(t >= s, tl.associative_scan(tl.where(t > s, a[None, :], 1.0), 1, multiply), 0.0)


@triton.jit
def inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for a strictly triangular A, upper or lower, by doubling the blocks that are inverted.

    With X the inverse of the diagonal blocks of width b, and B what A adds in blocks of width 2b, the inverse of those
    is X - X B X. No power of A is formed, so entries stay as small as those of the true inverse. Up to width 16 the
    diagonal blocks are a batch of their own, which spares the products with zeros between them.

    "16-bit" stands for float16, which has the digits of TF32 and half its instructions. Its range is enough: where
    the memory does not grow by four orders of magnitude inside a chunk, no entry of the inverse does.
    """
    if C == 16:
        X = _inverse_of_blocks(A, 1, PRECISION)
    else:
        G: tl.constexpr = C // 16
        own = tl.arange(0, G)[:, None, None, None] == tl.arange(0, G)[None, :, None, None]
        blocks = tl.permute(tl.reshape(A, (G, 16, G, 16)), (0, 2, 1, 3))
        X = _inverse_of_blocks(tl.sum(tl.where(own, blocks, 0.0), 1), G, PRECISION)
        X = tl.where(own, tl.expand_dims(X, 1), 0.0)
        X = tl.reshape(tl.permute(X, (0, 2, 1, 3)), (C, C))
        apart = tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]
        for bit in tl.static_range(4, 6):
            if (1 << bit) < C:
                B = tl.where((apart >> bit) == 1, A, 0.0)
                X -= _twice(X, B, PRECISION)
    return X


@triton.jit
def _twice(X, B, PRECISION: tl.constexpr):
    """X B X."""
    if PRECISION == "16-bit":
        result = dot(dot(X, B, tl.float16, "ieee"), X, tl.float16, "ieee")
    else:
        result = dot(dot(X, B, X.dtype, PRECISION), X, X.dtype, PRECISION)
    return result


@triton.jit
def _inverse_of_blocks(A, G: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly triangular blocks of width 16: (G, 16, 16), or (16, 16) for G = 1."""
    # The highest bit in which two positions differ tells the width at which they first share a block.
    apart = tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :]
    if G > 1:
        apart = apart[None, :, :]
    X = tl.where(apart == 0, 1.0, tl.where(apart == 1, -A, 0.0)).to(A.dtype)
    for bit in tl.static_range(1, 4):
        B = tl.where((apart >> bit) == 1, A, 0.0)
        X -= _twice(X, B, PRECISION)
    return X
