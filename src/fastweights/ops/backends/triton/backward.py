# mypy: disable-error-code="no-untyped-def"
"""The walk back through all chunks: the gradient of the state, and with `FUSED` every other gradient on the way.

Without `FUSED` a program takes some value columns only, and leaves the gradient of the state after each chunk and that
of the solved system's right side to `gradients.chunk_gradients`.
"""

import triton
import triton.language as tl

from fastweights.ops.backends.triton.gradients import decay_gradient, key_gradients, score_gradients
from fastweights.ops.backends.triton.pieces import (
    dot,
    load_gate,
    load_rows,
    multiply,
    reach_of,
    sequence,
    store_columns,
    store_rows,
)


@triton.jit(do_not_specialize=["T", "final"])
def walk_backward(
    q,
    k,
    v,
    a,
    e,
    w,
    cu_seqlens,
    states,
    inverses,
    dy,
    dW_end,
    dq,
    dk,
    dv,
    da,
    de,
    dw,
    dW,
    dstates,
    dright,
    T,
    final,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dy_token,
    dy_head,
    H: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    TIED: tl.constexpr,
    PACKED: tl.constexpr,
    FUSED: tl.constexpr,
    RIGHT: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):
    splits: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    head = (program // splits) % H
    n = program // (splits * H)
    first, length, slot = sequence(n, T, cu_seqlens, C, PACKED)

    rows = tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)
    m = (program % splits) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_state = (m[:, None] < M) & (d[None, :] < D)
    state = (n.to(tl.int64) * H + head) * D * M
    dW_t = tl.load(dW_end + state + d[None, :] * M + m[:, None], in_state & (final != 0), 0.0).to(ACC)

    chunks = tl.cdiv(length, C)
    token = first + (chunks - 1) * C
    slot += chunks - 1
    left = length - (chunks - 1) * C
    for _ in range(0, chunks):
        gate = token * H + head
        q_ = load_rows(q + token * q_token + head * q_head, rows, left, d, q_token, D)
        k_ = load_rows(k + token * k_token + head * k_head, rows, left, d, k_token, D)
        dy_ = load_rows(dy + token * dy_token + head * dy_head, rows, left, m, dy_token, M)
        k_t = tl.trans(k_)
        dy_t = tl.trans(dy_)
        state_at = (slot * H + head) * D * M + m[:, None] * D + d[None, :]

        # Coefficients that are not there cost nothing: the products they stand in are skipped.
        fade = tl.full((C,), 1.0, ACC)
        remain = tl.full((C,), 1.0, ACC)
        erase = tl.full((C,), 0.0, ACC)
        write = tl.full((C,), 1.0, ACC)
        last = 1.0
        lower = (rows[:, None] >= rows[None, :]).to(ACC)
        reach = lower
        if DECAY:
            a_ = load_gate(a + gate, rows, left, H, 1.0, ACC)
            fade = tl.associative_scan(a_, 0, multiply)
            a_next = load_gate(a + gate + H, rows, tl.minimum(left, C) - 1, H, 1.0, ACC)
            remain = tl.associative_scan(a_next, 0, multiply, reverse=True)
            last = tl.sum(tl.where(rows == C - 1, fade, 0.0), 0)
            reach = reach_of(a_, C)

        du = dot(dW_t, k_t, OPERAND, PRECISION)
        if DECAY:
            du *= remain[None, :]
        du += dot(dy_t, dot(q_, k_t, OPERAND, PRECISION) * reach, OPERAND, PRECISION)
        keys = lower
        X = lower
        if ERASE:
            erase = load_gate(e + gate, rows, left, H, 0.0, ACC)
            X = tl.trans(tl.load(inverses + (slot * H + head) * C * C + rows[:, None] * C + rows[None, :]))
            du = dot(du, X, OPERAND, PRECISION)
        if TIED:
            write = erase
        if WRITE:
            write = load_gate(w + gate, rows, left, H, 0.0, ACC)
        dv_at = dv + token * H * M + head * M
        if TIED or WRITE:
            store_columns(dv_at, du * write[None, :], rows, left, m, H * M, M)
        else:
            store_columns(dv_at, du, rows, left, m, H * M, M)

        if FUSED:
            v_ = load_rows(v + token * v_token + head * v_head, rows, left, m, v_token, M)
            W_t = tl.load(states + state_at, in_state, 0.0)
            u = v_.to(ACC)
            if TIED or WRITE:
                u *= write[:, None]
            if ERASE:
                keys = dot(k_, k_t, OPERAND, PRECISION)
                u -= dot(k_, tl.trans(W_t), OPERAND, PRECISION) * (erase * fade)[:, None]
                u = dot(X, u, OPERAND, PRECISION)
            # Rounded once, as the operand it is below.
            du_ = du.to(OPERAND)
            scores = lower
            if DECAY:
                scores = dot(k_, tl.trans(q_), OPERAND, PRECISION)
            dscores, dkeys, derase, dreach = score_gradients(
                u, dy_t, du_, scores, keys, reach, erase, C, DECAY, ERASE, OPERAND, PRECISION
            )
            dq_t, dk_, recalled, read, kept = key_gradients(
                q_, k_, W_t, dW_t, u, dy_t, du_, dscores, dkeys, fade, remain, erase, DECAY, ERASE, OPERAND, PRECISION
            )
            key_at = token * H * D + head * D
            store_columns(dq + key_at, dq_t, rows, left, d, H * D, D)
            store_rows(dk + key_at, dk_, rows, left, d, H * D, D)
            if ERASE:
                de_ = derase - fade * recalled
                if TIED:
                    de_ += tl.sum(du * tl.trans(v_).to(ACC), 0)
                tl.store(de + gate + rows * H, de_, rows < left)
            if WRITE:
                tl.store(dw + gate + rows * H, tl.sum(du * tl.trans(v_).to(ACC), 0), rows < left)
            if DECAY:
                a_before = load_gate(a + gate - H, rows, tl.where(rows > 0, left, 0), H, 1.0, ACC)
                whole = tl.sum(tl.sum(dW_t * W_t.to(ACC), 1), 0)
                dfade = read - erase * recalled + tl.where(rows == C - 1, whole, 0.0)
                da_ = decay_gradient(dreach, kept, dfade, reach, a_before, C, SOLVE)
                tl.store(da + gate + rows * H, da_, rows < left)
        else:
            tl.store(dstates + state_at, dW_t.to(dstates.dtype.element_ty), in_state)
            if RIGHT:
                store_columns(dright + token * H * M + head * M, du, rows, left, m, H * M, M)

        if DECAY:
            dW_t *= last
            dy_t = dy_t.to(ACC) * fade[None, :]
            erase *= fade
        dW_t += dot(dy_t, q_, OPERAND, PRECISION)
        if ERASE:
            dW_t -= dot(du * erase[None, :], k_, OPERAND, PRECISION)
        token -= C
        slot -= 1
        left += C

    tl.store(dW + state + d[None, :] * M + m[:, None], dW_t, in_state)
