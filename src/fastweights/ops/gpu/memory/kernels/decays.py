# mypy: disable-error-code="no-untyped-def"
"""Products of decays over stretches of a chunk, as powers of two of differences of summed logarithms.

A logarithm is a whole number and a rest of at most one half, summed apart: differences of the sums of whole numbers are
exact, however small some decays were, and the rests stay short. A decay of 0 is the whole number `NOTHING`, so that a
product over it is 0 and one over anything else is what it would be without. Signs are multiplied.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.common import exponential
from fastweights.ops.gpu.memory.kernels.tiles import dot, load_rows, product

# Far below the logarithm of any number; as many as a chunk has tokens can be summed exactly in float32.
NOTHING: tl.constexpr = tl.constexpr(-16384.0)


@triton.jit
def _joined(whole, rest, sign, next_whole, next_rest, next_sign):
    return whole + next_whole, rest + next_rest, sign * next_sign


@triton.jit
def _multiply(x, y):
    return x * y


@triton.jit
def _all_and_before(x, before, y, next_before):
    """Products of two stretches as one, whole and without the last factor."""
    return x * y, x * next_before


@triton.jit
def fades(a, o: tl.constexpr):
    """γ, Γ[-1] and γ[-1] of a chunk: what states and tokens are faded by."""
    one = tl.full((o.C,), 1.0, o.acc)
    fade = tl.associative_scan(a, 0, _multiply)
    # The factors from the other end, which is the last.
    remain = tl.associative_scan((a, one), 0, _all_and_before, reverse=True)[1]
    return fade, remain, tl.reduce(a, 0, _multiply)


@triton.jit
def decay_logarithms(a, o: tl.constexpr):
    """log2 |a| as whole numbers and rests, and the signs of a.

    Float32 has its own series: the GPU's logarithm is off by 2^-22 near 1, which a long memory adds up.
    """
    smallest: tl.constexpr = 2.2250738585072014e-308 if tl.float64 == o.acc else 1.1754943508222875e-38
    size = tl.abs(a)
    # Compared this way round, what is not a number stays so.
    closed = size < smallest
    size = tl.where(closed, 1.0, size)
    whole = tl.floor(tl.log2(size) + 0.5)
    near_one = size * tl.exp2(whole * -1.0)
    if tl.float64 == o.acc:
        rest = tl.log2(near_one)
    else:
        x = (near_one - 1.0) / (near_one + 1.0)
        square = x * x
        series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9))))
        rest = 2.8853900817779268 * x * series
    return tl.where(closed, NOTHING, whole), rest, tl.where(a < 0, -1.0, 1.0).to(a.dtype)


@triton.jit
def decay_sums(logarithms):
    """Those of γ_t = a_1 ⋯ a_t."""
    return tl.associative_scan(logarithms, 0, _joined)


@triton.jit
def decay_total(logarithms):
    """Those of the product of all decays of a chunk."""
    return tl.reduce(logarithms, 0, _joined)


@triton.jit
def sums_before(sums, logarithms):
    """Those of γ_{t-1}."""
    return sums[0] - logarithms[0], sums[1] - logarithms[1], sums[2] * logarithms[2]


@triton.jit
def power(sums):
    """The numbers that these are the logarithms of."""
    return tl.exp2(sums[0] + sums[1]) * sums[2]


@triton.jit
def power_between(sums, since):
    """The product of the decays after those in `since`, up to those in `sums`."""
    return tl.exp2((sums[0] - since[0]) + (sums[1] - since[1])) * (sums[2] * since[2])


@triton.jit
def reach(like, sums, since, STRICT: tl.constexpr, AXIS: tl.constexpr, C: tl.constexpr):
    """Γ[t, s] = a_{s+1} ⋯ a_t for s <= t, with `STRICT` for s < t, else 0; as a tile of rows t, or s for AXIS 1.

    `sums` belong to t and `since` to s. `like` is a product that the result will meet: added as zeros, and vectors one
    by one, it has the compiler form the tile where that product stands, instead of moving it there.
    """
    t = tl.expand_dims(tl.arange(0, C), 1 - AXIS)
    s = tl.expand_dims(tl.arange(0, C), AXIS)
    exponent = like * 0.0
    exponent += tl.expand_dims(sums[0], 1 - AXIS)
    exponent -= tl.expand_dims(since[0], AXIS)
    exponent += tl.expand_dims(sums[1], 1 - AXIS)
    exponent -= tl.expand_dims(since[1], AXIS)
    result = tl.exp2(tl.where(t > s if STRICT else t >= s, exponent, NOTHING))
    result *= tl.expand_dims(sums[2], 1 - AXIS)
    return result * tl.expand_dims(since[2], AXIS)


@triton.jit
def gradient_from_reach(dreach, fading, between, o: tl.constexpr):
    """Gradient of a from that of Γ, a tile of rows t whose part above the diagonal means nothing.

        da[r] = sum(dΓ[t, s] * prod(a[r + 1 : t + 1]) * prod(a[s + 1 : r]) for s < r <= t)  # not divided by any a

    `fading` is Γ as a tile of rows s, `between` Γ[t - 1, s] for s < t as one of rows t.
    """
    PRECISION: tl.constexpr = o.precision
    return tl.sum(product(fading, dreach, o.operand, PRECISION) * between, 1)


@triton.jit
def _linear(a, x, before, start, next_a, next_x, next_before, next_start):
    """Two stretches of x <- a x + x_t as one; `before` and `start` are a and x without the last step."""
    return a * next_a, x * next_a + next_x, a * next_before, x * next_before + next_start


@triton.jit
def gradient_from_ends(a, kept, dfade, sums, logarithms, o: tl.constexpr):
    """Gradient of a from that of Γ[-1] and γ, which tie a chunk to the states after and before it.

    da[r] = sum(dΓ[-1, s] * prod(a[r + 1 :]) * prod(a[s + 1 : r]) for s < r)
    da[r] += sum(dγ[t] * prod(a[r + 1 : t + 1]) * prod(a[:r]) for t >= r)
    """
    one = tl.full((o.C,), 1.0, o.acc)
    zero = tl.full((o.C,), 0.0, o.acc)
    earlier = tl.associative_scan((a, kept, one, zero), 0, _linear)[3]
    later = tl.associative_scan((a, a * dfade, one, zero), 0, _linear, reverse=True)[3] + dfade
    remain = power_between(decay_total(logarithms), sums)
    return earlier * remain + later * power(sums_before(sums, logarithms))


# Natural logarithms of decays: less than `LEAST` is as good as nothing. Up to `STEEP` away from the middle of a chunk,
# one factor stands for each of two tokens: e to twice that is near the largest number there is. In float32 it is less,
# since the digits before the point of a logarithm are lost behind it.
LEAST: tl.constexpr = tl.constexpr(-2000.0)
STEEP: tl.constexpr = tl.constexpr(60.0)
STEEP_IN_FULL: tl.constexpr = tl.constexpr(6.0)


@triton.jit
def load_logarithms(g, rows, left, d, o: tl.constexpr):
    """Log decays (C, D) of a chunk for some features, 0 past its last token."""
    return tl.maximum(load_rows(g, rows, left, d, o.H * o.D, o.D).to(o.acc), LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_shifted(x, rows, shift, left, d, stride, o: tl.constexpr):
    """Rows of a (tokens, D) matrix `shift` tokens on, zero outside of the same 16 tokens."""
    at = rows + shift
    inside = (at >= 0) & (at // 16 == rows // 16) & (at < left)
    return tl.load(x + at[:, None] * stride + d[None, :], inside[:, None] & (d[None, :] < o.D), 0.0).to(o.acc)


@triton.jit
def _sum_two(x, y, next_x, next_y):
    return x + next_x, y + next_y


@triton.jit
def log_sums(g, o: tl.constexpr):
    """Sums of log decays g (C, D) within 16 tokens: up to each one, past it, and all (C / 16, D).

    Whole numbers and rests of at most one half are summed apart. Differences of whole numbers are exact, and rests are
    short: small logarithms keep their digits beside those of decays of next to nothing.
    """
    D: tl.constexpr = g.shape[1]
    g = tl.reshape(g, (o.C // 16, 16, D))
    position = tl.arange(0, 16)[None, :, None]
    whole = tl.floor(g + 0.5)
    whole, rest = tl.associative_scan((whole, g - whole), 1, _sum_two)
    last = tl.sum(tl.where(position == 15, whole, 0.0), 1, keep_dims=True)
    last_rest = tl.sum(tl.where(position == 15, rest, 0.0), 1, keep_dims=True)
    until = (last - whole) + (last_rest - rest)
    total = tl.reshape(last + last_rest, (o.C // 16, D))
    shape: tl.constexpr = (o.C, D)
    return tl.reshape(whole + rest, shape), tl.reshape(until, shape), total


@triton.jit
def stretched(x, total, WIDTH: tl.constexpr, LATER: tl.constexpr, o: tl.constexpr):
    """Sums x (C, D) up to tokens, or with `LATER` past them, over stretches of `WIDTH` tokens instead of 16."""
    BLOCKS: tl.constexpr = o.C // 16
    D: tl.constexpr = x.shape[1]
    if BLOCKS > 1:
        own = tl.arange(0, BLOCKS)[:, None]
        other = tl.arange(0, BLOCKS)[None, :]
        counts = (own // (WIDTH // 16) == other // (WIDTH // 16)) & (other > own if LATER else other < own)
        more = tl.sum(tl.where(counts[:, :, None], total[None, :, :], 0.0), 1)
        x = tl.reshape(tl.reshape(x, (BLOCKS, 16, D)) + more[:, None, :], (o.C, D))
    return x


@triton.jit
def across(later, earlier, HALF: tl.constexpr):
    """Say of pairs of tokens whether the middle of a stretch of two times `HALF` tokens stands between them."""
    return (later // HALF == earlier // HALF + 1) & (later // HALF % 2 == 1)


@triton.jit
def around_middle(g, o: tl.constexpr):
    """Sums of log decays g (C, D) since the middle of a chunk, negative past it; those up to and past the middle (D,).

    Also returned: whether any is steep.
    """
    sums = tl.cumsum(g, 0)
    rows = tl.arange(0, o.C)[:, None]
    first = tl.sum(tl.where(rows == o.C // 2 - 1, sums, 0.0), 0)
    since = sums - first[None, :]
    most: tl.constexpr = STEEP_IN_FULL if o.precision == "tf32x3" else STEEP
    steep = tl.max(tl.max(tl.abs(since), 1), 0) > most
    return since, first, tl.sum(tl.where(rows == o.C - 1, since, 0.0), 0), steep


@triton.jit
def key_products(scores, keys, q, k, g, rows, left, d, q_token, k_token, o: tl.constexpr):
    """Add what some features give to products under decays per key channel, (C, C) with tokens s that are read as rows.

        reach = exp(g[s + 1 : t + 1].sum(0))                    # for s <= t, (D,)
        scores[s, t] += (k[s] * reach * q[t]).sum()
        keys[s, t] += (k[s] * reach * k[t]).sum()

    A product of decays is one since the middle of the chunk over another, so that all pairs are one matrix product.
    Where these quotients are of too large or too small numbers, pairs across the middle of 32 and of 64 tokens are a
    matrix product each, of factors of at most 1, and pairs of the same 16 tokens are gone through one by one. Also
    returned: q * γ, k * γ, k * Γ[-1] and γ[-1].
    """
    s = rows[:, None]
    t = rows[None, :]
    q_ = load_rows(q, rows, left, d, q_token, o.D).to(o.acc)
    k_ = load_rows(k, rows, left, d, k_token, o.D).to(o.acc)
    g_ = load_logarithms(g, rows, left, d, o)
    middle, first, rest, steep = around_middle(g_, o)
    if steep:
        since, until, total = log_sums(g_, o)
        if not o.only_faded:
            reach = tl.zeros_like(g_)
            for j in range(0, 16):
                reached = load_shifted(k, rows, -j, left, d, k_token, o) * exponential(reach)
                pairs = t - s == j
                scores += tl.where(pairs, tl.sum(q_ * reached, 1)[None, :], 0.0)
                if o.erase:
                    keys += tl.where(pairs, tl.sum(k_ * reached, 1)[None, :], 0.0)
                reach += tl.maximum(load_shifted(g, rows, -j, left, d, o.H * o.D, o), LEAST)
            if o.C > 16:
                fade = exponential(since)
                remain = exponential(until)
                scores, keys = _add_products(scores, keys, q_, k_, fade, remain, across(t, s, 16), o)
            if o.C > 32:
                fade = exponential(stretched(since, total, 32, False, o))
                remain = exponential(stretched(until, total, 32, True, o))
                scores, keys = _add_products(scores, keys, q_, k_, fade, remain, across(t, s, 32), o)
        fade = exponential(stretched(since, total, o.C, False, o))
        remain = exponential(stretched(until, total, o.C, True, o))
        last = exponential(tl.sum(total, 0))
    else:
        fade = exponential(middle)
        remain = exponential(-middle)
        if not o.only_faded:
            scores, keys = _add_products(scores, keys, q_, k_, fade, remain, s <= t, o)
        fade *= exponential(first)[None, :]
        remain *= exponential(rest)[None, :]
        last = exponential(first + rest)
    return scores, keys, q_ * fade, k_ * fade, k_ * remain, last


@triton.jit
def _add_products(scores, keys, q, k, fade, remain, pairs, o: tl.constexpr):
    """Add the products of some pairs of tokens, rows s, whose product of decays is that of two factors."""
    read = (k * remain).to(o.operand)
    scores += tl.where(pairs, dot(read, tl.trans(q * fade), o), 0.0)
    if o.erase:
        keys += tl.where(pairs, dot(read, tl.trans(k * fade), o), 0.0)
    return scores, keys
