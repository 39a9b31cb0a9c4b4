# mypy: disable-error-code="no-untyped-def"
"""Gradients of one chunk, given the state before it and the gradient of the state after it.

No product takes the transpose of another product as an operand: some versions of the compiler get that wrong on Hopper.
What is needed both ways is formed both ways, or transposed after the last product.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.maps import raw_gradient
from fastweights.ops.gpu.memory.kernels.tiles import dot, multiply, store_columns, store_rows


@triton.jit
def score_gradients(
    u,
    error,
    dy_t,
    drest,
    erase,
    scores,
    keys,
    reach,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of q_t·k_s and, negated, of k_t·k_s as tiles of rows s, as `scores` is; of Γ; of e with `DIAGONAL`.

    `drest` is e dR. With `DIAGONAL`, for one gate that does both, it is dR: E dR^T has the gate's gradient on its
    diagonal, and less the factors e_s e_t the gradient of k_t·k_s above it.
    """
    s = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    dscores = dot(u, dy_t, OPERAND, PRECISION)
    dreach = dscores
    dkeys = dscores
    de = erase
    if DIAGONAL:
        pairs = dot(error, drest, OPERAND, PRECISION)
        de = tl.sum(tl.where(s == t, pairs, 0.0), 1)
        dkeys = tl.where(s < t, pairs * (erase[:, None] * erase[None, :]), 0.0)
    elif ERASE:
        # Strictly below the diagonal of A.
        dkeys = tl.where(s < t, dot(u, drest, OPERAND, PRECISION), 0.0)
    if DECAY:
        reach_t = tl.trans(reach)
        dreach = dscores * scores
        dscores *= reach_t
        if ERASE:
            dreach -= dkeys * keys
            dkeys *= reach_t
    else:
        dscores = tl.where(s <= t, dscores, 0.0)
    return dscores, dkeys, dreach, de


@triton.jit
def key_gradients(
    q,
    q_t,
    k,
    k_t,
    W,
    dW_t,
    u,
    dy_t,
    drest,
    erase,
    dscores,
    dkeys,
    fade,
    remain,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq (D, C) and dk (C, D) for some features; under decay, their shares in what γ and Γ[C, :] are multiplied by.

    `drest` is as in `score_gradients`.
    """
    dq = dot(W, dy_t, OPERAND, PRECISION)
    read = fade
    if DECAY:
        read = tl.sum(dq * q_t.to(dq.dtype), 0)
        dq *= fade[None, :]
    dq += dot(k_t, dscores, OPERAND, PRECISION)

    dk = dot(u, dW_t, OPERAND, PRECISION)
    kept = remain
    if DECAY:
        kept = tl.sum(dk * k.to(dk.dtype), 1)
        dk *= remain[:, None]
    dk += dot(dscores, q, OPERAND, PRECISION)
    recalled = tl.zeros_like(fade)
    if ERASE:
        less = dot(W, drest, OPERAND, PRECISION)
        if DIAGONAL:
            less *= erase[None, :]
        if DECAY:
            recalled = tl.sum(less * k_t.to(less.dtype), 0)
            less *= fade[None, :]
        less += dot(k_t, dkeys, OPERAND, PRECISION)
        dk = dk - dot(dkeys, k, OPERAND, PRECISION) - tl.trans(less)
    return dq, dk, recalled, read, kept


@triton.jit
def store_key_gradients(
    dq,
    dk,
    dq_t,
    dk_,
    q_scale,
    q,
    k,
    q_raw,
    k_raw,
    rows,
    left,
    columns,
    q_token,
    k_token,
    H: tl.constexpr,
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
    """Back through the feature map, if there is one, and out. With `KNOWN`, given 1 over the sums of the queries."""
    if MAP != 0:
        columns = tl.arange(0, BLOCK_R)
    dq_t = raw_gradient(
        dq_t, q_scale, q, q_raw, rows, left, q_token, 0,
        R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, OPERAND, ACC, PRECISION, KNOWN,
    )  # fmt: skip
    store_columns(dq, dq_t, rows, left, columns, H * R, R)
    dk_ = raw_gradient(
        dk_, q_scale, k, k_raw, rows, left, k_token, 1,
        R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, OPERAND, ACC, PRECISION, False,
    )  # fmt: skip
    store_rows(dk, dk_, rows, left, columns, H * R, R)


@triton.jit
def store_gate_gradient(dx, gradient, slope, rows, left, H: tl.constexpr):
    """Back through the sigmoid, if there is one, and out."""
    tl.store(dx + rows * H, gradient * slope, rows < left)


@triton.jit
def decay_gradient(dreach, kept, dfade, reach, a_before, C: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of a from that of Γ (tile of rows s), of Γ[C, :] and of γ, without dividing by any a.

    da_r = sum over s < r <= t of dΓ[t, s] (a_{r+1} ⋯ a_t) (a_{s+1} ⋯ a_{r-1}), where s = -1 stands for γ.
    """
    s = tl.arange(0, C)[:, None]
    r = tl.arange(0, C)[None, :]
    dreach = tl.where(s <= r, dreach, 0.0) + tl.where(r == C - 1, kept[:, None], 0.0)
    later = dot(dreach, reach, dreach.dtype, "tf32" if PRECISION == "16-bit" else PRECISION)
    between = tl.associative_scan(tl.where(r > s + 1, a_before[None, :], 1.0), 1, multiply)
    from_reach = tl.sum(tl.where(s < r, later * between, 0.0), 0)
    from_fade = tl.sum(reach * dfade[:, None], 0) * tl.associative_scan(a_before, 0, multiply)
    return from_reach + from_fade
