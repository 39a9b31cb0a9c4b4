# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the softmax with label smoothing: logits are read once, and once more for their gradient."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3e38)


@triton.jit
def row_losses(
    logits,  # (N, V)
    targets,  # (N,)
    smoothed,  # (N,) float32
    nll,  # (N,) float32
    totals,  # (N,) float32
    V,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute both losses of one row of logits x and its log-sum-exp, with a running maximum.

    total = x.logsumexp(0)
    nll = total - x[target]
    smoothed = nll + SMOOTHING * (total - x.mean() - nll)
    """
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
    logits,  # (N, V)
    targets,  # (N,)
    totals,  # (N,) log-sum-exps
    d_smoothed,  # (N,)
    d_nll,  # (N,), read with BOTH
    d_logits,  # (N, V)
    V,
    SMOOTHING: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one row of logits x, under g of the smoothed loss and h of the plain one.

    p = exp(x - total)
    d = (g + h) * p - ((1 - SMOOTHING) * g + h) * one_hot(target) - g * SMOOTHING / V
    """
    row = tl.program_id(0).to(tl.int64)
    total, target = tl.load(totals + row), tl.load(targets + row)
    g = tl.load(d_smoothed + row)
    whole, once = g, (1 - SMOOTHING) * g
    if BOTH:
        h = tl.load(d_nll + row)
        whole += h
        once += h
    uniform = g * SMOOTHING / V
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + at, at < V, -float("inf")).to(tl.float32)
        d = whole * tl.exp(x - total) - uniform - tl.where(at == target, once, 0.0)
        tl.store(d_logits + row * V + at, d.to(d_logits.dtype.element_ty), at < V)
