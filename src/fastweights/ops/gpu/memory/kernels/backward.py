# mypy: disable-error-code="no-untyped-def"
"""The walk back through all chunks: the gradient of the state, and with `FUSED` every other gradient on the way.

Without `FUSED` a program takes some value columns only, and leaves the gradient of the state after each chunk and that
of the right side of the equation for U to `chunks.chunk_gradients`; with `ONLY` it leaves nothing but the gradient of
the first state.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.gradients import (
    decay_gradient,
    key_gradients,
    score_gradients,
    store_gate_gradient,
    store_key_gradients,
)
from fastweights.ops.gpu.memory.kernels.maps import DPFP, gate_slope, load_features, load_raw, mapped, one_over_sum
from fastweights.ops.gpu.memory.kernels.tiles import (
    at_or_above,
    dot,
    load_again,
    load_both,
    load_by_product,
    load_gate,
    load_rows,
    load_turned,
    multiply,
    reach_of,
    sequence,
    store_columns,
)


@triton.jit(do_not_specialize=["T", "final", "wanted"])
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
    errors,
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
    wanted,
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
    GROUPED: tl.constexpr,
    FUSED: tl.constexpr,
    ONLY: tl.constexpr,
    RIGHT: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    GATHER: tl.constexpr,
    TWICE: tl.constexpr,
    AHEAD: tl.constexpr,
    LOGITS: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):
    q_token *= UNIT
    q_head *= UNIT
    k_token *= UNIT
    k_head *= UNIT
    v_token *= UNIT
    v_head *= UNIT
    dy_token *= UNIT
    dy_head *= UNIT
    splits: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    # Tiles that products take from both sides are loaded for each.
    AGAIN: tl.constexpr = AHEAD and TWICE and PRECISION != "ieee" and MAP == 0
    # A product that is needed anyway has the sums for the gate's gradient on its diagonal.
    DIAGONAL: tl.constexpr = AHEAD and TIED
    KNOWN: tl.constexpr = AHEAD and MAP != 0 and SUM
    program = tl.program_id(0)
    head = (program // splits) % H
    n = program // (splits * H)
    first, length, slot = sequence(n, T, cu_seqlens, C, PACKED, GROUPED)

    rows = tl.arange(0, C)
    s = rows[:, None]
    t = rows[None, :]
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
        gate = token * gate_token + head * gate_head
        gate_out = token * H + head
        q_at = q + token * q_token + head * q_head
        k_at = k + token * k_token + head * k_head
        q_, q_t = load_features(
            q_at, rows, left, d, q_token, R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION
        )
        k_, k_t = load_features(
            k_at, rows, left, d, k_token, R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION
        )
        dy_at = dy + token * dy_token + head * dy_head
        dy_t = load_turned(dy_at, rows, left, m, dy_token, M, TWICE)
        q_left = load_again(q_, q_at, rows, left, d, q_token, 1, D, AGAIN)
        state_at = (slot * H + head) * D * M
        here = state_at + m[:, None] * D + d[None, :]
        # Coefficients that are not there cost nothing: the products they stand in are skipped.
        fade = tl.full((C,), 1.0, ACC)
        remain = tl.full((C,), 1.0, ACC)
        erase = tl.full((C,), 0.0, ACC)
        write = tl.full((C,), 1.0, ACC)
        last = 1.0
        if ERASE:
            erase = load_gate(e + gate, rows, left, gate_token, 0.0, LOGITS, ACC)
            Z_at = inverses + (slot * H + head) * C * C
            if TWICE:
                Z = tl.load(Z_at + t * C + s, at_or_above(t, s), 0.0)
            else:
                Z = tl.trans(tl.load(Z_at + s * C + t, at_or_above(s, t), 0.0))
        if TIED:
            write = erase
        if WRITE:
            write = load_gate(w + gate, rows, left, gate_token, 0.0, LOGITS, ACC)
        if FUSED:
            # What gradients go back through at the end: loaded there, it would be waited for.
            q_raw = q_
            k_raw = k_
            q_scale = erase
            if KNOWN:
                # The compiler finds that this was formed before. From q_raw it would be another sum, over more lanes.
                raw = load_raw(q_at, rows, left, q_token, 1, R, BLOCK_R, TWICE)
                phi = mapped(
                    q_at, raw, rows, left, q_token, 1, R, D, BLOCK_R, BLOCK_D, MAP, GATHER, OPERAND, ACC, PRECISION
                )
                q_scale = tl.sum(one_over_sum(phi, 1, ACC), 1)
            if MAP != 0:
                if AHEAD and MAP != DPFP and PRECISION == "ieee":
                    q_raw = load_by_product(q_at, rows, left, tl.arange(0, BLOCK_R), q_token, C, BLOCK_R, R)
                else:
                    q_raw = load_raw(q_at, rows, left, q_token, 0, R, BLOCK_R, TWICE)
                k_raw = load_raw(k_at, rows, left, k_token, 1, R, BLOCK_R, TWICE)
            if DECAY:
                a_slope = gate_slope(a + gate, rows, left, gate_token, LOGITS, ACC)
            if ERASE:
                e_slope = gate_slope(e + gate, rows, left, gate_token, LOGITS, ACC)
            if WRITE:
                w_slope = gate_slope(w + gate, rows, left, gate_token, LOGITS, ACC)
            W = load_turned(states + state_at, m, M, d, D, D, TWICE)
            error = dy_t
            if ERASE:
                error_at = errors + token * H * M + head * M
                if DIAGONAL:
                    error = load_rows(error_at, rows, left, m, H * M, M)
                else:
                    error, error_t = load_both(error_at, rows, left, m, H * M, M, TWICE)
            k_t_left = load_again(k_t, k_at, rows, left, d, k_token, 0, D, AGAIN)
            dy_t_right = load_again(dy_t, dy_at, rows, left, m, dy_token, 0, M, AGAIN)
            if not TIED:
                v_, v_t = load_both(v + token * v_token + head * v_head, rows, left, m, v_token, M, TWICE)

        scores = dot(q_left, k_t, OPERAND, PRECISION)
        reach = scores
        du = dot(dW_t, k_t, OPERAND, PRECISION)
        if DECAY:
            a_ = load_gate(a + gate, rows, left, gate_token, 1.0, LOGITS, ACC)
            fade = tl.associative_scan(a_, 0, multiply)
            a_next = load_gate(a + gate + gate_token, rows, tl.minimum(left, C) - 1, gate_token, 1.0, LOGITS, ACC)
            remain = tl.associative_scan(a_next, 0, multiply, reverse=True)
            last = tl.sum(tl.where(rows == C - 1, fade, 0.0), 0)
            reach = reach_of(a_, C)
            du *= remain[None, :]
            scores *= reach
        elif C == 64:
            # So many predicates do not fit in registers of theirs.
            scores *= (s >= t).to(ACC)
        else:
            scores = tl.where(s >= t, scores, 0.0)
        du += dot(dy_t, scores, OPERAND, PRECISION)
        # e dR: the gradient of what is not recalled; that of the values where one gate does both.
        drest = du
        if ERASE:
            du += dot(du * (erase * -1.0)[None, :], Z, OPERAND, PRECISION)
            drest = du * erase[None, :]
        dv_at = dv + token * H * M + head * M
        if not ONLY:
            if TIED:
                store_columns(dv_at, drest, rows, left, m, H * M, M)
            elif WRITE:
                store_columns(dv_at, du * write[None, :], rows, left, m, H * M, M)
            else:
                store_columns(dv_at, du, rows, left, m, H * M, M)

        if FUSED:
            # Rounded once, as the operand it is below.
            rounded = (du if DIAGONAL else drest).to(OPERAND)
            keys = reach
            scores = reach
            if DECAY:
                scores = dot(k_, q_t, OPERAND, PRECISION)
                if ERASE:
                    keys = dot(k_, k_t, OPERAND, PRECISION)
            if TIED:
                u = error.to(ACC) * erase[:, None]
            else:
                u = v_.to(ACC) * write[:, None]
                if ERASE:
                    u += error.to(ACC) * erase[:, None]
            u = u.to(OPERAND)
            dscores, dkeys, dreach, de_ = score_gradients(
                u, error, dy_t_right, rounded, erase, scores, keys, reach,
                C, DECAY, ERASE, DIAGONAL, OPERAND, PRECISION,
            )  # fmt: skip
            dq_t, dk_, recalled, read, kept = key_gradients(
                q_, q_t, k_, k_t_left, W, dW_t, u, dy_t_right, rounded, erase, dscores, dkeys, fade, remain,
                DECAY, ERASE, DIAGONAL, OPERAND, PRECISION,
            )  # fmt: skip
            key_at = gate_out * R
            store_key_gradients(
                dq + key_at, dk + key_at, dq_t, dk_, q_scale, q_at, k_at, q_raw, k_raw, rows, left, d, q_token, k_token,
                H, R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, OPERAND, ACC, PRECISION, KNOWN,
            )  # fmt: skip
            if ERASE:
                if not DIAGONAL:
                    de_ = tl.sum(du * error_t.to(ACC), 0)
                store_gate_gradient(de + gate_out, de_, e_slope, rows, left, H)
            if WRITE:
                dw_ = tl.sum(du * v_t.to(ACC), 0)
                store_gate_gradient(dw + gate_out, dw_, w_slope, rows, left, H)
            if DECAY:
                earlier = tl.where(rows > 0, left, 0)
                a_before = load_gate(a + gate - gate_token, rows, earlier, gate_token, 1.0, LOGITS, ACC)
                W_t = tl.load(states + here, in_state, 0.0)
                whole = tl.sum(tl.sum(dW_t * W_t.to(ACC), 1), 0)
                dfade = read - recalled + tl.where(rows == C - 1, whole, 0.0)
                da_ = decay_gradient(dreach, kept, dfade, reach, a_before, C, SOLVE)
                store_gate_gradient(da + gate_out, da_, a_slope, rows, left, H)
        elif not ONLY:
            tl.store(dstates + here, dW_t.to(dstates.dtype.element_ty), in_state)
            if RIGHT:
                store_columns(dright + token * H * M + head * M, du, rows, left, m, H * M, M)

        if DECAY:
            dW_t *= last
            dy_t = dy_t.to(ACC) * fade[None, :]
            drest *= fade[None, :]
        dW_t += dot(dy_t, q_, OPERAND, PRECISION)
        if ERASE:
            dW_t -= dot(drest, k_, OPERAND, PRECISION)
        token -= C
        slot -= 1
        left += C

    tl.store(dW + state + d[None, :] * M + m[:, None], dW_t, in_state & (wanted != 0))
