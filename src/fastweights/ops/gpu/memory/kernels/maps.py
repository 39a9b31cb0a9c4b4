# mypy: disable-error-code="no-untyped-def"
"""Feature maps, sum normalisation and sigmoids on chip, from raw keys, queries and logits, and their gradients.

A tile of phi stands as (C, D) for `AXIS` = 1, or as (D, C) for `AXIS` = 0. Each feature of DPFP is a product of two
entries of the raw head. They are loaded entry by entry with `o.gather`, else taken from one tile by products with
matrices of 0, 1 and -1. A tile that is needed both ways is then formed both ways, since no product may take the
transpose of another (see gradients.py). A tile may hold some features only, from the one numbered `first` on.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.common import below, exponential, rectified
from fastweights.ops.gpu.memory.kernels.tiles import dot, load_both, load_rows, load_transposed


@triton.jit
def factor_position(j, SECOND: tl.constexpr, R: tl.constexpr):
    """Where in r = [x, -x] a factor of feature j stands: at p = j mod 2R, or i = j // 2R + 1 before that."""
    p = j % (2 * R)
    if SECOND:
        p = (p + 2 * R - 1 - j // (2 * R)) % (2 * R)
    return p


@triton.jit
def selection(SECOND: tl.constexpr, AXIS: tl.constexpr, o: tl.constexpr, first=0):
    """Which raw entry, and with which sign, a factor of each feature is: (R, D), transposed for AXIS 0."""
    j = tl.expand_dims(first + tl.arange(0, o.block_D), 1 - AXIS)
    x = tl.expand_dims(tl.arange(0, o.block_R), AXIS)
    p = factor_position(j, SECOND, o.R)
    sign = tl.where(p == x, 1.0, 0.0) - tl.where(p == x + o.R, 1.0, 0.0)
    return tl.where((j < o.D) & (x < o.R), sign, 0.0).to(o.operand)


@triton.jit
def load_raw(x, rows, left, stride, AXIS: tl.constexpr, o: tl.constexpr, first=0):
    """Entries of raw keys or queries from the one numbered `first` on, (C, R) or (R, C)."""
    columns = first + tl.arange(0, o.block_R)
    if AXIS == 0:
        raw = load_transposed(x, rows, left, columns, stride, o.R, o.both_ways)
    else:
        raw = load_rows(x, rows, left, columns, stride, o.R)
    return raw


@triton.jit
def factor(x, raw, rows, left, stride, SECOND: tl.constexpr, AXIS: tl.constexpr, o: tl.constexpr, first=0):
    """One of the two factors of every feature of DPFP, (C, D) or (D, C)."""
    if o.gather:
        j = tl.expand_dims(first + tl.arange(0, o.block_D), 1 - AXIS)
        token = tl.expand_dims(rows, AXIS)
        p = factor_position(j, SECOND, o.R)
        entry = tl.load(x + token * stride + p % o.R, (token < left) & (j < o.D), 0.0).to(o.acc)
        result = rectified(tl.where(p < o.R, entry, -entry))
    else:
        chosen = selection(SECOND, AXIS, o, first)
        result = rectified(dot(raw, chosen, o) if AXIS == 1 else dot(chosen, raw, o))
    return result


@triton.jit
def mapped(x, raw, rows, left, stride, AXIS: tl.constexpr, o: tl.constexpr, first=0):
    """phi of raw keys or queries before its normalisation; zero past the last of `left` tokens."""
    if o.map == "dpfp":
        one = factor(x, raw, rows, left, stride, False, AXIS, o, first)
        phi = one * factor(x, raw, rows, left, stride, True, AXIS, o, first)
    else:
        raw = raw.to(o.acc)
        if o.map == "elu":
            phi = tl.where(raw > 0, raw + 1.0, exponential(raw))
            columns = first + tl.arange(0, o.block_R)
            inside = tl.expand_dims(rows < left, AXIS) & tl.expand_dims(columns < o.R, 1 - AXIS)
            phi = tl.where(inside, phi, 0.0)
        else:
            phi = rectified(raw)
    return phi


@triton.jit
def one_over_sum(phi, AXIS: tl.constexpr, o: tl.constexpr):
    """1 over the sum of each token's features, and 0 where there is no sum, as `normalization.safe_divide` has it."""
    total = tl.sum(phi, AXIS)
    # The square root of the smallest normal number.
    tiny: tl.constexpr = 1.4916681462400413e-154 if tl.float64 == o.acc else 1.0842021724855044e-19
    empty = total < tiny
    return tl.expand_dims(tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total)), AXIS)


@triton.jit
def load_features(x, rows, left, columns, stride, o: tl.constexpr):
    """Keys or queries as (C, D) and as (D, C), zero past the last of `left` tokens. Without a map, some `columns`."""
    if o.map == "none":
        phi, phi_t = load_both(x, rows, left, columns, stride, o.D, o.both_ways)
    else:
        tl.static_assert(o.block_D >= o.D, "a feature map is computed whole")
        raw = load_raw(x, rows, left, stride, 1, o)
        phi = mapped(x, raw, rows, left, stride, 1, o)
        if o.sum:
            phi *= one_over_sum(phi, 1, o)
        phi = phi.to(o.operand)
        if o.map != "dpfp" or o.gather:
            phi_t = tl.trans(phi)
        else:
            raw = load_raw(x, rows, left, stride, 0, o)
            phi_t = mapped(x, raw, rows, left, stride, 0, o)
            if o.sum:
                phi_t *= one_over_sum(phi_t, 0, o)
            phi_t = phi_t.to(o.operand)
    return phi, phi_t


@triton.jit
def raw_gradient(
    dphi, scale, x, raw, rows, left, stride, AXIS: tl.constexpr, KNOWN: tl.constexpr, o: tl.constexpr, first=0
):
    """Gradient of `raw` keys or queries, which stand at x, (C, R) or (R, C), from that of phi.

    With `KNOWN` 1 over the sum of each token's features is given as `scale`.
    """
    dx = dphi
    if o.map != "none":
        if o.sum:
            phi = mapped(x, raw, rows, left, stride, AXIS, o)
            scale = tl.expand_dims(scale, AXIS) if KNOWN else one_over_sum(phi, AXIS, o)
            dx = (dx - tl.expand_dims(tl.sum(dx * phi, AXIS), AXIS) * scale) * scale
        if o.map == "dpfp":
            one = factor(x, raw, rows, left, stride, False, AXIS, o, first)
            other = factor(x, raw, rows, left, stride, True, AXIS, o, first)
            d_one = tl.where(one > 0, dx * other, 0.0)
            d_other = tl.where(other > 0, dx * one, 0.0)
            to_one = selection(False, 1 - AXIS, o, first)
            to_other = selection(True, 1 - AXIS, o, first)
            if AXIS == 1:
                dx = dot(d_one, to_one, o) + dot(d_other, to_other, o)
            else:
                dx = dot(to_one, d_one, o) + dot(to_other, d_other, o)
        else:
            raw = raw.to(o.acc)
            dx = tl.where(raw > 0, dx, dx * exponential(raw) if o.map == "elu" else 0.0)
    return dx


@triton.jit
def gate_slope(x, rows, left, stride, o: tl.constexpr):
    """Derivative of a gate by what is given for it, exact at both ends."""
    slope = tl.full(rows.shape, 1.0, o.acc)
    if o.logits:
        e = exponential(-tl.abs(tl.load(x + rows * stride, rows < left, 0.0).to(o.acc)))
        slope = e / ((1.0 + e) * (1.0 + e))
    return slope


@triton.jit
def vector_features(x, j, o: tl.constexpr):
    """phi of one token, as a vector over features j."""
    if o.map == "dpfp":
        p = factor_position(j, False, o.R)
        one = tl.load(x + p % o.R, j < o.D, 0.0).to(o.acc)
        one = rectified(tl.where(p < o.R, one, -one))
        p = factor_position(j, True, o.R)
        other = tl.load(x + p % o.R, j < o.D, 0.0).to(o.acc)
        phi = one * rectified(tl.where(p < o.R, other, -other))
    else:
        phi = tl.load(x + j, j < o.D, 0.0).to(o.acc)
        if o.map == "elu":
            phi = tl.where(j < o.D, exponential(below(phi)) + rectified(phi), 0.0)
        elif o.map == "relu":
            phi = rectified(phi)
    if o.sum:
        phi = quotient(phi, tl.sum(phi, 0), o)
    return phi


@triton.jit
def quotient(x, by, o: tl.constexpr):
    """x / by, and 0 where `by` is next to 0, as `normalization.safe_divide` has it."""
    tiny: tl.constexpr = 1.4916681462400413e-154 if tl.float64 == o.acc else 1.0842021724855044e-19
    empty = tl.abs(by) < tiny
    return tl.where(empty, 0.0, x / tl.where(empty, 1.0, by))
