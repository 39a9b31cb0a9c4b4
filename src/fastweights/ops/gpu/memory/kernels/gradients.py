# mypy: disable-error-code="no-untyped-def"
"""Gradients of one chunk, given the state before it and the gradient of the state after it.

No product takes the transpose of another product as an operand: some versions of the compiler get that wrong on Hopper.
What is needed both ways is formed both ways, or transposed after the last product.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.maps import raw_gradient
from fastweights.ops.gpu.memory.kernels.tiles import dot, store_columns, store_rows


@triton.jit
def score_gradients(
    u,  # (C, M)
    error,  # (C, M), E
    dy_t,  # (M, C)
    drest,  # (M, C), e dR; dR with `DIAGONAL`
    erase,  # (C,)
    scores,  # (C, C), k_s·q_t
    keys,  # (C, C), k_s·k_t
    fading,  # (C, C), Γ, rows s
    DIAGONAL: tl.constexpr,
    o: tl.constexpr,
):
    """Gradients of q_t·k_s and, negated, of k_t·k_s as tiles of rows s, as `scores` is; of Γ^T; of e with `DIAGONAL`.

        dscores = u @ dy_t                                      # dP, transposed
        dkeys = (u @ drest).triu(1)
        dreach = dscores * scores - dkeys * keys
        dscores, dkeys = (dscores * Γ.T).triu(), dkeys * Γ.T

    With `DIAGONAL`, for one gate that does both, E dR^T has the gate's gradient on its diagonal, and less the factors
    e_s e_t the gradient of k_t·k_s above it.
    """
    s = tl.arange(0, o.C)[:, None]
    t = tl.arange(0, o.C)[None, :]
    dscores = dot(u, dy_t, o)
    dreach = dscores
    dkeys = dscores
    de = erase
    if DIAGONAL:
        pairs = dot(error, drest, o)
        de = tl.sum(tl.where(s == t, pairs, 0.0), 1)
        dkeys = tl.where(s < t, pairs * (erase[:, None] * erase[None, :]), 0.0)
    elif o.erase:
        # Strictly below the diagonal of A.
        dkeys = tl.where(s < t, dot(u, drest, o), 0.0)
    if o.decay:
        dreach = dscores * scores
        dscores *= fading
        if o.erase:
            dreach -= dkeys * keys
            dkeys *= fading
    else:
        dscores = tl.where(s <= t, dscores, 0.0)
    return dscores, dkeys, dreach, de


@triton.jit
def key_gradients(
    q,  # (C, D)
    q_t,  # (D, C)
    k,  # (C, D)
    k_t,  # (D, C)
    W,  # (D, M), the state before the chunk
    dW_t,  # (M, D), the gradient of the state after it
    u,  # (C, M)
    dy_t,  # (M, C)
    drest,  # (M, C), as in `score_gradients`
    erase,  # (C,)
    dscores,  # (C, C)
    dkeys,  # (C, C)
    fade,  # (C,), γ
    remain,  # (C,), Γ[-1]
    DIAGONAL: tl.constexpr,
    o: tl.constexpr,
):
    """dq (D, C) and dk (C, D) for some features; under decay, their shares in what γ and Γ[-1] are multiplied by.

    dq = W @ dy_t * γ + k.T @ dscores
    dk = u @ dW_t * Γ[-1] + dscores @ q - (dkeys + dkeys.T) @ k - (W @ drest * γ).T
    """
    dq = dot(W, dy_t, o)
    read = fade
    if o.decay:
        read = tl.sum(dq * q_t.to(dq.dtype), 0)
        dq *= fade[None, :]
    dq += dot(k_t, dscores, o)

    dk = dot(u, dW_t, o)
    kept = remain
    if o.decay:
        kept = tl.sum(dk * k.to(dk.dtype), 1)
        dk *= remain[:, None]
    dk += dot(dscores, q, o)
    recalled = tl.zeros_like(fade)
    if o.erase:
        less = dot(W, drest, o)
        if DIAGONAL:
            less *= erase[None, :]
        if o.decay:
            recalled = tl.sum(less * k_t.to(less.dtype), 0)
            less *= fade[None, :]
        less += dot(k_t, dkeys, o)
        dk = dk - dot(dkeys, k, o) - tl.trans(less)
    return dq, dk, recalled, read, kept


@triton.jit
def store_key_gradients(
    dq,  # (T, H, R), where the chunk begins
    dk,  # (T, H, R)
    dq_t,  # (D, C)
    dk_,  # (C, D)
    q_scale,  # (C,), with `KNOWN` 1 over the sums of the mapped queries
    q,  # (T, H, R)
    k,  # (T, H, R)
    q_raw,  # (R, C)
    k_raw,  # (C, R)
    rows,
    left,
    columns,
    q_token,
    k_token,
    KNOWN: tl.constexpr,
    o: tl.constexpr,
):
    """Back through the feature map, if there is one, and out."""
    if o.map != "none":
        columns = tl.arange(0, o.block_R)
    dq_t = raw_gradient(dq_t, q_scale, q, q_raw, rows, left, q_token, 0, KNOWN, o)
    store_columns(dq, dq_t, rows, left, columns, o.H * o.R, o.R)
    dk_ = raw_gradient(dk_, q_scale, k, k_raw, rows, left, k_token, 1, False, o)
    store_rows(dk, dk_, rows, left, columns, o.H * o.R, o.R)


@triton.jit
def store_gate_gradient(dx, gradient, slope, rows, left, H: tl.constexpr):
    """Back through the sigmoid, if there is one, and out."""
    tl.store(dx + rows * H, gradient * slope, rows < left)
