# mypy: disable-error-code="no-untyped-def"
"""Gradients of chunks side by side, from what the walk back left: everything but dv, which the walk has written."""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.gradients import (
    decay_gradient,
    key_gradients,
    score_gradients,
    store_gate_gradient,
    store_key_gradients,
)
from fastweights.ops.gpu.memory.kernels.maps import gate_slope, load_features, load_raw
from fastweights.ops.gpu.memory.kernels.tiles import (
    dot,
    load_both,
    load_gate,
    load_rows,
    load_turned,
    multiply,
    reach_of,
    sequence,
    sequence_of,
)


@triton.jit(do_not_specialize=["N", "T"])
def chunk_gradients(
    q,
    k,
    v,
    a,
    e,
    w,
    cu_seqlens,
    states,
    errors,
    dy,
    dq,
    dk,
    da,
    de,
    dw,
    dstates,
    dright,
    N,
    T,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dy_token,
    dy_head,
    gate_token,
    gate_head,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    TIED: tl.constexpr,
    PACKED: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    GATHER: tl.constexpr,
    TWICE: tl.constexpr,
    BATCH: tl.constexpr,
    LOGITS: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):
    """Everything but dv of `BATCH` chunks of one head, from what the walk back left; programs run side by side.

    With more than one chunk, loads run ahead as they do in a walk.
    """
    q_token *= UNIT
    q_head *= UNIT
    k_token *= UNIT
    k_head *= UNIT
    v_token *= UNIT
    v_head *= UNIT
    dy_token *= UNIT
    dy_head *= UNIT
    program = tl.program_id(0)
    head = program % H
    rows = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    features = tl.arange(0, BLOCK_D)
    s = rows[:, None]
    t = rows[None, :]
    WHOLE: tl.constexpr = BLOCK_D >= D
    EARLY: tl.constexpr = BLOCK_D >= D and BLOCK_D * BLOCK_M <= 4096
    for i in range(0, BATCH):
        if PACKED:
            slot = program // H * BATCH + i
            n = sequence_of(slot, N, cu_seqlens, C)
        else:
            # First all first chunks: what the walk back has touched last may still be in the cache.
            n = program // H % N
            slot = n * tl.cdiv(T, C) + program // H // N * BATCH + i
        first, length, first_slot = sequence(n, T, cu_seqlens, C, PACKED)
        start = (slot - first_slot) * C
        # Nothing, where there is no such chunk.
        left = tl.maximum(length - start, 0).to(tl.int32)
        states_there = tl.where(left > 0, M, 0)
        token = first + start
        gate = token * gate_token + head * gate_head
        gate_out = token * H + head
        key_at = (token * H + head) * R
        state = (slot.to(tl.int64) * H + head) * D * M
        q_at = q + token * q_token + head * q_head
        k_at = k + token * k_token + head * k_head

        # Loads first: none passes a barrier, and turning a tile takes one, so each would be waited for on its own.
        at = (token * H + head) * M
        dy_t = load_turned(dy + token * dy_token + head * dy_head, rows, left, m, dy_token, M, TWICE)
        du, du_t = load_both(dright + at, rows, left, m, H * M, M, TWICE)
        v_ = du
        if not TIED:
            v_ = load_rows(v + token * v_token + head * v_head, rows, left, m, v_token, M)
        erase = tl.full((C,), 0.0, ACC)
        error = du
        if ERASE:
            erase = load_gate(e + gate, rows, left, gate_token, 0.0, LOGITS, ACC)
            error = load_rows(errors + at, rows, left, m, H * M, M)
        write = tl.full((C,), 1.0, ACC)
        if WRITE:
            write = load_gate(w + gate, rows, left, gate_token, 0.0, LOGITS, ACC)
        if EARLY:
            W_t, W_ = load_both(states + state, m, states_there, features, D, D, TWICE)
            dW_t = load_rows(dstates + state, m, states_there, features, D, D)
        if WHOLE:
            k_, k_t = load_features(
                k_at, rows, left, features, k_token,
                R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION,
            )  # fmt: skip
            q_, q_t = load_features(
                q_at, rows, left, features, q_token,
                R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION,
            )  # fmt: skip

        q_raw = dy_t
        k_raw = dy_t
        if MAP != 0:
            q_raw = load_raw(q_at, rows, left, q_token, 0, R, BLOCK_R, TWICE)
            k_raw = load_raw(k_at, rows, left, k_token, 1, R, BLOCK_R, TWICE)
        if DECAY:
            a_slope = gate_slope(a + gate, rows, left, gate_token, LOGITS, ACC)
        if ERASE:
            e_slope = gate_slope(e + gate, rows, left, gate_token, LOGITS, ACC)
        if WRITE:
            w_slope = gate_slope(w + gate, rows, left, gate_token, LOGITS, ACC)

        fade = tl.full((C,), 1.0, ACC)
        remain = tl.full((C,), 1.0, ACC)
        reach = (s >= t).to(ACC)
        scores = tl.zeros((C, C), ACC)
        keys = tl.zeros((C, C), ACC)
        if DECAY:
            a_ = load_gate(a + gate, rows, left, gate_token, 1.0, LOGITS, ACC)
            fade = tl.associative_scan(a_, 0, multiply)
            a_next = load_gate(a + gate + gate_token, rows, tl.minimum(left, C) - 1, gate_token, 1.0, LOGITS, ACC)
            remain = tl.associative_scan(a_next, 0, multiply, reverse=True)
            reach = reach_of(a_, C)
            for f in range(0, D, BLOCK_D):
                if not WHOLE:
                    d = f + features
                    k_, k_t = load_features(
                        k_at, rows, left, d, k_token,
                        R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION,
                    )  # fmt: skip
                    q_, q_t = load_features(
                        q_at, rows, left, d, q_token,
                        R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION,
                    )  # fmt: skip
                scores += dot(k_, q_t, OPERAND, PRECISION)
                if ERASE:
                    keys += dot(k_, k_t, OPERAND, PRECISION)

        if TIED:
            u = error.to(ACC) * erase[:, None]
        else:
            u = v_.to(ACC) * write[:, None]
            if ERASE:
                u += error.to(ACC) * erase[:, None]
        # Rounded once, as the operands they are below.
        u = u.to(OPERAND)
        drest = (du_t.to(ACC) * erase[None, :]).to(OPERAND)
        dscores, dkeys, dreach, _ = score_gradients(
            u, error, dy_t, drest, erase, scores, keys, reach, C, DECAY, ERASE, False, OPERAND, PRECISION
        )
        recalled = tl.zeros((C,), ACC)
        read = tl.zeros((C,), ACC)
        kept = tl.zeros((C,), ACC)
        whole = tl.zeros((), ACC)
        for f in range(0, D, BLOCK_D):
            d = f + features
            if not WHOLE:
                q_, q_t = load_features(
                    q_at, rows, left, d, q_token,
                    R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION,
                )  # fmt: skip
                k_, k_t = load_features(
                    k_at, rows, left, d, k_token,
                    R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION,
                )  # fmt: skip
            if not EARLY:
                W_t, W_ = load_both(states + state, m, states_there, d, D, D, TWICE)
                dW_t = load_rows(dstates + state, m, states_there, d, D, D)
            dq_t, dk_, recalled_, read_, kept_ = key_gradients(
                q_, q_t, k_, k_t, W_, dW_t, u, dy_t, drest, erase, dscores, dkeys, fade, remain,
                DECAY, ERASE, False, OPERAND, PRECISION,
            )  # fmt: skip
            store_key_gradients(
                dq + key_at, dk + key_at, dq_t, dk_, fade, q_at, k_at, q_raw, k_raw, rows, left, d, q_token, k_token,
                H, R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, OPERAND, ACC, PRECISION, False,
            )  # fmt: skip
            if DECAY:
                recalled += recalled_
                read += read_
                kept += kept_
                whole += tl.sum(tl.sum(dW_t.to(ACC) * W_t.to(ACC), 1), 0)

        if ERASE:
            de_ = tl.sum(du.to(ACC) * error.to(ACC), 1)
            store_gate_gradient(de + gate_out, de_, e_slope, rows, left, H)
        if WRITE:
            dw_ = tl.sum(du.to(ACC) * v_.to(ACC), 1)
            store_gate_gradient(dw + gate_out, dw_, w_slope, rows, left, H)
        if DECAY:
            earlier = tl.where(rows > 0, left, 0)
            a_before = load_gate(a + gate - gate_token, rows, earlier, gate_token, 1.0, LOGITS, ACC)
            dfade = read - recalled + tl.where(rows == C - 1, whole, 0.0)
            da_ = decay_gradient(dreach, kept, dfade, reach, a_before, C, SOLVE)
            store_gate_gradient(da + gate_out, da_, a_slope, rows, left, H)
