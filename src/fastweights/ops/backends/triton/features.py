# mypy: disable-error-code="no-untyped-def"
"""Feature maps, sum normalisation and sigmoids on chip, from raw keys, queries and logits, and their gradients.

A tile of phi stands as (C, D) for `AXIS` = 1, or as (D, C) for `AXIS` = 0. DPFP takes both factors of every feature from
the raw head by products with matrices of 0, 1 and -1; a tile that is needed both ways is formed both ways, since no
product may take the transpose of another (see gradients.py).
"""

import triton
import triton.language as tl

from fastweights.ops.backends.triton.pieces import dot, load_rows

ELU = tl.constexpr(1)
RELU = tl.constexpr(2)
DPFP = tl.constexpr(3)


@triton.jit
def picks(
    SECOND: tl.constexpr,
    AXIS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Which raw entry, and with which sign, a factor of each feature is: (BLOCK_R, BLOCK_D), transposed for AXIS 0.

    With r = [x, -x], feature j of block i = j // 2R + 1 is relu(r_p) relu(r_{p - i}) for p = j mod 2R.
    """
    if AXIS == 1:
        j = tl.arange(0, BLOCK_D)[None, :]
        x = tl.arange(0, BLOCK_R)[:, None]
    else:
        j = tl.arange(0, BLOCK_D)[:, None]
        x = tl.arange(0, BLOCK_R)[None, :]
    p = j % (2 * R)
    if SECOND:
        p = (p + 2 * R - 1 - j // (2 * R)) % (2 * R)
    sign = tl.where(p == x, 1.0, 0.0) - tl.where(p == x + R, 1.0, 0.0)
    return tl.where((j < D) & (x < R), sign, 0.0).to(OPERAND)


@triton.jit
def factors(
    x,
    AXIS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Both factors of DPFP."""
    first = picks(False, AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND)
    second = picks(True, AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND)
    if AXIS == 1:
        one = dot(x, first, OPERAND, PRECISION)
        other = dot(x, second, OPERAND, PRECISION)
    else:
        one = dot(first, x, OPERAND, PRECISION)
        other = dot(second, x, OPERAND, PRECISION)
    return tl.maximum(one, 0.0), tl.maximum(other, 0.0)


@triton.jit
def mapped(
    x,
    inside,
    AXIS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAP: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """phi before its normalisation; zero where not `inside`."""
    if MAP == DPFP:
        one, other = factors(x, AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND, PRECISION)
        phi = one * other
    elif MAP == ELU:
        wide = x.to(ACC)
        phi = tl.where(inside, tl.exp(tl.minimum(wide, 0.0)) + tl.maximum(wide, 0.0), 0.0)
    else:
        phi = tl.maximum(x.to(ACC), 0.0)
    return phi


@triton.jit
def one_over_sum(phi, AXIS: tl.constexpr, ACC: tl.constexpr):
    """1 over the sum of each token's features, and 0 where there is no sum, as `normalization.safe_divide` has it."""
    total = tl.sum(phi, AXIS)
    # The square root of the smallest normal number.
    empty = total < (1.4916681462400413e-154 if ACC == tl.float64 else 1.0842021724855044e-19)
    return tl.expand_dims(tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total)), AXIS)


@triton.jit
def features(
    x,
    inside,
    AXIS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """phi of a raw tile, in ACC."""
    phi = mapped(x, inside, AXIS, R, D, BLOCK_R, BLOCK_D, MAP, OPERAND, ACC, PRECISION)
    if SUM:
        phi *= one_over_sum(phi, AXIS, ACC)
    return phi


@triton.jit
def load_features(
    x,
    rows,
    left,
    columns,
    stride,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys or queries as (C, D) and as (D, C), zero past the last of `left` tokens. Without a map, some `columns`."""
    if MAP == 0:
        phi = load_rows(x, rows, left, columns, stride, D)
        phi_t = tl.trans(phi)
    else:
        tl.static_assert(BLOCK_D >= D, "a feature map is computed whole")
        raw = load_rows(x, rows, left, tl.arange(0, BLOCK_R), stride, R)
        inside = (rows[:, None] < left) & (tl.arange(0, BLOCK_D)[None, :] < D)
        phi = features(raw, inside, 1, R, D, BLOCK_R, BLOCK_D, MAP, SUM, OPERAND, ACC, PRECISION).to(OPERAND)
        if MAP == DPFP:
            phi_t = features(
                tl.trans(raw), tl.trans(inside), 0, R, D, BLOCK_R, BLOCK_D, MAP, SUM, OPERAND, ACC, PRECISION
            ).to(OPERAND)
        else:
            phi_t = tl.trans(phi)
    return phi, phi_t


@triton.jit
def raw_gradient(
    dphi,
    x,
    rows,
    left,
    stride,
    AXIS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of raw keys or queries at x, (C, R) or (R, C), from that of phi."""
    dx = dphi
    if MAP != 0:
        raw = load_rows(x, rows, left, tl.arange(0, BLOCK_R), stride, R)
        inside = (rows[:, None] < left) & (tl.arange(0, BLOCK_D)[None, :] < D)
        if AXIS == 0:
            raw = tl.trans(raw)
            inside = tl.trans(inside)
        if SUM:
            phi = mapped(raw, inside, AXIS, R, D, BLOCK_R, BLOCK_D, MAP, OPERAND, ACC, PRECISION)
            scale = one_over_sum(phi, AXIS, ACC)
            dx = (dx - tl.expand_dims(tl.sum(dx * phi, AXIS), AXIS) * scale) * scale
        if MAP == DPFP:
            one, other = factors(raw, AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND, PRECISION)
            done = tl.where(one > 0, dx * other, 0.0)
            dother = tl.where(other > 0, dx * one, 0.0)
            first = picks(False, 1 - AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND)
            second = picks(True, 1 - AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND)
            if AXIS == 1:
                dx = dot(done, first, OPERAND, PRECISION) + dot(dother, second, OPERAND, PRECISION)
            else:
                dx = dot(first, done, OPERAND, PRECISION) + dot(second, dother, OPERAND, PRECISION)
        elif MAP == ELU:
            dx *= tl.exp(tl.minimum(raw.to(ACC), 0.0))
        else:
            dx = tl.where(raw > 0, dx, 0.0)
    return dx


@triton.jit
def gate_slope(x, rows, left, stride, LOGITS: tl.constexpr, ACC: tl.constexpr):
    """Derivative of a gate by what is given for it, exact at both ends."""
    slope = tl.full(rows.shape, 1.0, ACC)
    if LOGITS:
        e = tl.exp(-tl.abs(tl.load(x + rows * stride, rows < left, 0.0).to(ACC)))
        slope = e / ((1.0 + e) * (1.0 + e))
    return slope
