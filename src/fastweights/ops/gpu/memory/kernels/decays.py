# mypy: disable-error-code="no-untyped-def"
"""Products of decays over stretches of a chunk, as powers of two of differences of summed logarithms.

A logarithm is a whole number and a rest of at most one half, summed apart: differences of the sums of whole numbers are
exact, however small some decays were, and the rests stay short. A decay of 0 is the whole number `NOTHING`, so that a
product over it is 0 and one over anything else is what it would be without. Signs are multiplied.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.tiles import product

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
