# mypy: disable-error-code="no-untyped-def"
"""Feature maps, sum normalisation and sigmoids on chip, from raw keys, queries and logits, and their gradients.

A tile of phi stands as (C, D) for `AXIS` = 1, or as (D, C) for `AXIS` = 0. Each feature of DPFP is a product of two
entries of the raw head. They are loaded entry by entry with `GATHER`, else taken from one tile by products with
matrices of 0, 1 and -1. A tile that is needed both ways is then formed both ways, since no product may take the
transpose of another (see gradients.py).
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.tiles import dot, exponential, load_both, load_rows, load_turned

ELU = tl.constexpr(1)
RELU = tl.constexpr(2)
DPFP = tl.constexpr(3)


@triton.jit
def rectified(x):
    """max(0, x). Not a plain `tl.maximum`, which makes 0 of what is not a number."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def below(x):
    """min(0, x), likewise."""
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def places(j, SECOND: tl.constexpr, R: tl.constexpr):
    """Where in r = [x, -x] a factor of feature j stands: at p = j mod 2R, or i = j // 2R + 1 before that."""
    p = j % (2 * R)
    if SECOND:
        p = (p + 2 * R - 1 - j // (2 * R)) % (2 * R)
    return p


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
    """Which raw entry, and with which sign, a factor of each feature is: (BLOCK_R, BLOCK_D), transposed for AXIS 0."""
    j = tl.expand_dims(tl.arange(0, BLOCK_D), 1 - AXIS)
    x = tl.expand_dims(tl.arange(0, BLOCK_R), AXIS)
    p = places(j, SECOND, R)
    sign = tl.where(p == x, 1.0, 0.0) - tl.where(p == x + R, 1.0, 0.0)
    return tl.where((j < D) & (x < R), sign, 0.0).to(OPERAND)


@triton.jit
def load_raw(x, rows, left, stride, AXIS: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, TWICE: tl.constexpr):
    """Raw keys or queries, (C, R) or (R, C)."""
    columns = tl.arange(0, BLOCK_R)
    if AXIS == 0:
        raw = load_turned(x, rows, left, columns, stride, R, TWICE)
    else:
        raw = load_rows(x, rows, left, columns, stride, R)
    return raw


@triton.jit
def factor(
    x,
    raw,
    rows,
    left,
    stride,
    SECOND: tl.constexpr,
    AXIS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GATHER: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The first or the second factor of DPFP."""
    if GATHER:
        j = tl.expand_dims(tl.arange(0, BLOCK_D), 1 - AXIS)
        token = tl.expand_dims(rows, AXIS)
        p = places(j, SECOND, R)
        entry = tl.load(x + token * stride + p % R, (token < left) & (j < D), 0.0).to(ACC)
        result = rectified(tl.where(p < R, entry, -entry))
    else:
        selection = picks(SECOND, AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND)
        if AXIS == 1:
            result = rectified(dot(raw, selection, OPERAND, PRECISION))
        else:
            result = rectified(dot(selection, raw, OPERAND, PRECISION))
    return result


@triton.jit
def mapped(
    x,
    raw,
    rows,
    left,
    stride,
    AXIS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAP: tl.constexpr,
    GATHER: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """phi of raw keys or queries before its normalisation; zero past the last of `left` tokens."""
    if MAP == DPFP:
        one = factor(x, raw, rows, left, stride, False, AXIS, R, D, BLOCK_R, BLOCK_D, GATHER, OPERAND, ACC, PRECISION)
        phi = one * factor(
            x, raw, rows, left, stride, True, AXIS, R, D, BLOCK_R, BLOCK_D, GATHER, OPERAND, ACC, PRECISION
        )
    else:
        raw = raw.to(ACC)
        if MAP == ELU:
            phi = tl.where(raw > 0, raw + 1.0, exponential(raw))
            inside = tl.expand_dims(rows < left, AXIS) & tl.expand_dims(tl.arange(0, BLOCK_R) < R, 1 - AXIS)
            phi = tl.where(inside, phi, 0.0)
        else:
            phi = rectified(raw)
    return phi


@triton.jit
def one_over_sum(phi, AXIS: tl.constexpr, ACC: tl.constexpr):
    """1 over the sum of each token's features, and 0 where there is no sum, as `normalization.safe_divide` has it."""
    total = tl.sum(phi, AXIS)
    # The square root of the smallest normal number.
    tiny: tl.constexpr = 1.4916681462400413e-154 if tl.float64 == ACC else 1.0842021724855044e-19
    empty = total < tiny
    return tl.expand_dims(tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total)), AXIS)


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
    GATHER: tl.constexpr,
    TWICE: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys or queries as (C, D) and as (D, C), zero past the last of `left` tokens. Without a map, some `columns`."""
    if MAP == 0:
        phi, phi_t = load_both(x, rows, left, columns, stride, D, TWICE)
    else:
        tl.static_assert(BLOCK_D >= D, "a feature map is computed whole")
        raw = load_raw(x, rows, left, stride, 1, R, BLOCK_R, TWICE)
        phi = mapped(x, raw, rows, left, stride, 1, R, D, BLOCK_R, BLOCK_D, MAP, GATHER, OPERAND, ACC, PRECISION)
        if SUM:
            phi *= one_over_sum(phi, 1, ACC)
        phi = phi.to(OPERAND)
        if MAP != DPFP or GATHER:
            phi_t = tl.trans(phi)
        else:
            raw = load_raw(x, rows, left, stride, 0, R, BLOCK_R, TWICE)
            phi_t = mapped(x, raw, rows, left, stride, 0, R, D, BLOCK_R, BLOCK_D, MAP, GATHER, OPERAND, ACC, PRECISION)
            if SUM:
                phi_t *= one_over_sum(phi_t, 0, ACC)
            phi_t = phi_t.to(OPERAND)
    return phi, phi_t


@triton.jit
def raw_gradient(
    dphi,
    scale,
    x,
    raw,
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
    GATHER: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """Gradient of `raw` keys or queries, which stand at x, (C, R) or (R, C), from that of phi.

    With `KNOWN` 1 over the sum of each token's features is given as `scale`.
    """
    dx = dphi
    if MAP != 0:
        if SUM:
            phi = mapped(x, raw, rows, left, stride, AXIS, R, D, BLOCK_R, BLOCK_D, MAP, GATHER, OPERAND, ACC, PRECISION)
            scale = tl.expand_dims(scale, AXIS) if KNOWN else one_over_sum(phi, AXIS, ACC)
            dx = (dx - tl.expand_dims(tl.sum(dx * phi, AXIS), AXIS) * scale) * scale
        if MAP == DPFP:
            one = factor(
                x, raw, rows, left, stride, False, AXIS, R, D, BLOCK_R, BLOCK_D, GATHER, OPERAND, ACC, PRECISION
            )
            other = factor(
                x, raw, rows, left, stride, True, AXIS, R, D, BLOCK_R, BLOCK_D, GATHER, OPERAND, ACC, PRECISION
            )
            done = tl.where(one > 0, dx * other, 0.0)
            dother = tl.where(other > 0, dx * one, 0.0)
            first = picks(False, 1 - AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND)
            second = picks(True, 1 - AXIS, R, D, BLOCK_R, BLOCK_D, OPERAND)
            if AXIS == 1:
                dx = dot(done, first, OPERAND, PRECISION) + dot(dother, second, OPERAND, PRECISION)
            else:
                dx = dot(first, done, OPERAND, PRECISION) + dot(second, dother, OPERAND, PRECISION)
        else:
            raw = raw.to(ACC)
            dx = tl.where(raw > 0, dx, dx * exponential(raw) if MAP == ELU else 0.0)
    return dx


@triton.jit
def gate_slope(x, rows, left, stride, LOGITS: tl.constexpr, ACC: tl.constexpr):
    """Derivative of a gate by what is given for it, exact at both ends."""
    slope = tl.full(rows.shape, 1.0, ACC)
    if LOGITS:
        e = exponential(-tl.abs(tl.load(x + rows * stride, rows < left, 0.0).to(ACC)))
        slope = e / ((1.0 + e) * (1.0 + e))
    return slope


@triton.jit
def vector_features(
    x,
    j,
    R: tl.constexpr,
    D: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
):
    """phi of one token, as a vector over features j."""
    if MAP == DPFP:
        p = places(j, False, R)
        one = tl.load(x + p % R, j < D, 0.0).to(ACC)
        one = rectified(tl.where(p < R, one, -one))
        p = places(j, True, R)
        other = tl.load(x + p % R, j < D, 0.0).to(ACC)
        phi = one * rectified(tl.where(p < R, other, -other))
    else:
        phi = tl.load(x + j, j < D, 0.0).to(ACC)
        if MAP == ELU:
            phi = tl.where(j < D, exponential(below(phi)) + rectified(phi), 0.0)
        elif MAP == RELU:
            phi = rectified(phi)
    if SUM:
        phi = quotient(phi, tl.sum(phi, 0), ACC)
    return phi


@triton.jit
def quotient(x, by, ACC: tl.constexpr):
    """x / by for a number `by`, and 0 where that is next to 0, as `normalization.safe_divide` has it."""
    tiny: tl.constexpr = 1.4916681462400413e-154 if tl.float64 == ACC else 1.0842021724855044e-19
    empty = tl.abs(by) < tiny
    return tl.where(empty, 0.0, x / tl.where(empty, 1.0, by))
