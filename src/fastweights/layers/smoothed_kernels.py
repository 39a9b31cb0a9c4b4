# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the softmax with label smoothing: logits are read once, and once more for their gradient."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3e38)


@triton.jit
def row_losses(logits, targets, smoothed, nll, totals, V, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr):
    """Both losses of a row of V logits, and its log-sum-exp, with a running maximum."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + columns, columns < V, -float("inf")).to(tl.float32)
    # A word that is ruled out has -inf; so may all of a block, whose maximum must not be subtracted from itself.
    highest = tl.maximum(tl.max(x, 0), LOWEST)
    weight = tl.sum(tl.exp(x - highest), 0)
    plain = tl.sum(tl.where(columns < V, x, 0.0), 0)
    for start in range(BLOCK, V, BLOCK):
        at = start + columns
        x = tl.load(logits + row * V + at, at < V, -float("inf")).to(tl.float32)
        new = tl.maximum(highest, tl.max(x, 0))
        weight = weight * tl.exp(highest - new) + tl.sum(tl.exp(x - new), 0)
        plain += tl.sum(tl.where(at < V, x, 0.0), 0)
        highest = new
    total = highest + tl.log(weight)
    loss = total - tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32)
    tl.store(nll + row, loss)
    if SMOOTHING > 0:
        tl.store(smoothed + row, loss + SMOOTHING * (total - plain / V - loss))
    else:
        tl.store(smoothed + row, loss)
    tl.store(totals + row, total)


@triton.jit
def row_gradients(
    logits,
    targets,
    totals,
    d_smoothed,
    d_nll,
    d_logits,
    V,
    SMOOTHING: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(g + h) p - ((1 - s) g + h) [target] - g s / V, where g and h come to the smoothed loss and to the plain one."""
    row = tl.program_id(0).to(tl.int64)
    total, target = tl.load(totals + row), tl.load(targets + row)
    g = tl.load(d_smoothed + row)
    whole, once = g, (1 - SMOOTHING) * g
    if BOTH:
        h = tl.load(d_nll + row)
        whole += h
        once += h
    even = g * SMOOTHING / V
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + at, at < V, -float("inf")).to(tl.float32)
        d = whole * tl.exp(x - total) - even - tl.where(at == target, once, 0.0)
        tl.store(d_logits + row * V + at, d.to(d_logits.dtype.element_ty), at < V)
