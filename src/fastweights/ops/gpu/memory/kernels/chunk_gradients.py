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
    load_transposed,
    multiply,
    reach_of,
    sequence,
    sequence_of,
)


@triton.jit(do_not_specialize=["N", "T"])
def chunk_gradients(
    q,  # (B, T, H, R)
    k,  # (B, T, H, R)
    v,  # (B, T, H, M)
    gates,  # a, e, w, each (B, T, H) or None
    cu_seqlens,  # (N + 1,) or None
    states,  # (slots, H, M, D), kept by `walk_forward`
    errors,  # (B, T, H, M), the same
    dy,  # (B, T, H, M)
    dq,  # (B, T, H, R)
    dk,  # (B, T, H, R)
    dgates,  # da, de, dw, each (B, T, H) or None
    dstates,  # (slots, H, M, D), left by `walk_backward`
    dright,  # (B, T, H, M), the same
    N,
    T,
    strides,  # token and head strides of q, k, v, dy and the gates
    o: tl.constexpr,
):
    """Everything but dv of some chunks of one head, from what the walk back left; programs run side by side.

        U = E * e                                               # one gate erases and writes; else E * e + v * w
        dscores, dkeys, dΓ = `score_gradients`
        for features of D at a time:
            dq, dk = `key_gradients`                            # and their shares in the gradients of γ and Γ[-1]
        de, dw = (dR * E).sum(1), (dR * v).sum(1)
        da = `decay_gradient`

    With more than one chunk a program, loads run ahead as they do in a walk.
    """
    C: tl.constexpr = o.C
    a, e, w = gates
    da, de, dw = dgates
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, gate_token, gate_head = strides
    q_token *= o.unit
    q_head *= o.unit
    k_token *= o.unit
    k_head *= o.unit
    v_token *= o.unit
    v_head *= o.unit
    dy_token *= o.unit
    dy_head *= o.unit
    program = tl.program_id(0)
    head = program % o.H
    rows = tl.arange(0, C)
    m = tl.arange(0, o.block_M)
    features = tl.arange(0, o.block_D)
    s = rows[:, None]
    t = rows[None, :]
    WHOLE: tl.constexpr = o.block_D >= o.D
    EARLY: tl.constexpr = o.block_D >= o.D and o.block_D * o.block_M <= 4096
    for i in range(0, o.chunks_per_program):
        if o.packed:
            slot = program // o.H * o.chunks_per_program + i
            n = sequence_of(slot, N, cu_seqlens, C)
        else:
            # First all first chunks: what the walk back has touched last may still be in the cache.
            n = program // o.H % N
            slot = n * tl.cdiv(T, C) + program // o.H // N * o.chunks_per_program + i
        first, length, first_slot = sequence(n, T, cu_seqlens, o)
        start = (slot - first_slot) * C
        # Nothing, where there is no such chunk.
        left = tl.maximum(length - start, 0).to(tl.int32)
        states_there = tl.where(left > 0, o.M, 0)
        token = first + start
        gate = token * gate_token + head * gate_head
        gate_out = token * o.H + head
        key_at = (token * o.H + head) * o.R
        state = (slot.to(tl.int64) * o.H + head) * o.D * o.M
        q_at = q + token * q_token + head * q_head
        k_at = k + token * k_token + head * k_head

        # Loads first: none passes a barrier, and turning a tile takes one, so each would be waited for on its own.
        at = (token * o.H + head) * o.M
        dy_t = load_transposed(dy + token * dy_token + head * dy_head, rows, left, m, dy_token, o.M, o.both_ways)
        du, du_t = load_both(dright + at, rows, left, m, o.H * o.M, o.M, o.both_ways)
        v_ = du
        if not o.tied:
            v_ = load_rows(v + token * v_token + head * v_head, rows, left, m, v_token, o.M)
        erase = tl.full((C,), 0.0, o.acc)
        error = du
        if o.erase:
            erase = load_gate(e + gate, rows, left, gate_token, 0.0, o)
            error = load_rows(errors + at, rows, left, m, o.H * o.M, o.M)
        write = tl.full((C,), 1.0, o.acc)
        if o.write:
            write = load_gate(w + gate, rows, left, gate_token, 0.0, o)
        if EARLY:
            W_t, W_ = load_both(states + state, m, states_there, features, o.D, o.D, o.both_ways)
            dW_t = load_rows(dstates + state, m, states_there, features, o.D, o.D)
        if WHOLE:
            k_, k_t = load_features(k_at, rows, left, features, k_token, o)
            q_, q_t = load_features(q_at, rows, left, features, q_token, o)

        q_raw = dy_t
        k_raw = dy_t
        if o.map != "none":
            q_raw = load_raw(q_at, rows, left, q_token, 0, o)
            k_raw = load_raw(k_at, rows, left, k_token, 1, o)
        if o.decay:
            a_slope = gate_slope(a + gate, rows, left, gate_token, o)
        if o.erase:
            e_slope = gate_slope(e + gate, rows, left, gate_token, o)
        if o.write:
            w_slope = gate_slope(w + gate, rows, left, gate_token, o)

        fade = tl.full((C,), 1.0, o.acc)
        remain = tl.full((C,), 1.0, o.acc)
        reach = (s >= t).to(o.acc)
        scores = tl.zeros((C, C), o.acc)
        keys = tl.zeros((C, C), o.acc)
        if o.decay:
            a_ = load_gate(a + gate, rows, left, gate_token, 1.0, o)
            fade = tl.associative_scan(a_, 0, multiply)
            a_next = load_gate(a + gate + gate_token, rows, tl.minimum(left, C) - 1, gate_token, 1.0, o)
            remain = tl.associative_scan(a_next, 0, multiply, reverse=True)
            reach = reach_of(a_, C)
            for f in range(0, o.D, o.block_D):
                if not WHOLE:
                    d = f + features
                    k_, k_t = load_features(k_at, rows, left, d, k_token, o)
                    q_, q_t = load_features(q_at, rows, left, d, q_token, o)
                scores += dot(k_, q_t, o)
                if o.erase:
                    keys += dot(k_, k_t, o)

        if o.tied:
            u = error.to(o.acc) * erase[:, None]
        else:
            u = v_.to(o.acc) * write[:, None]
            if o.erase:
                u += error.to(o.acc) * erase[:, None]
        # Rounded once, as the operands they are below.
        u = u.to(o.operand)
        drest = (du_t.to(o.acc) * erase[None, :]).to(o.operand)
        dscores, dkeys, dreach, _ = score_gradients(u, error, dy_t, drest, erase, scores, keys, reach, False, o)
        recalled = tl.zeros((C,), o.acc)
        read = tl.zeros((C,), o.acc)
        kept = tl.zeros((C,), o.acc)
        whole = tl.zeros((), o.acc)
        for f in range(0, o.D, o.block_D):
            d = f + features
            if not WHOLE:
                q_, q_t = load_features(q_at, rows, left, d, q_token, o)
                k_, k_t = load_features(k_at, rows, left, d, k_token, o)
            if not EARLY:
                W_t, W_ = load_both(states + state, m, states_there, d, o.D, o.D, o.both_ways)
                dW_t = load_rows(dstates + state, m, states_there, d, o.D, o.D)
            dq_t, dk_, recalled_, read_, kept_ = key_gradients(
                q_, q_t, k_, k_t, W_, dW_t, u, dy_t, drest, erase, dscores, dkeys, fade, remain, False, o
            )
            store_key_gradients(
                dq + key_at, dk + key_at, dq_t, dk_, fade, q_at, k_at, q_raw, k_raw,
                rows, left, d, q_token, k_token, False, o,
            )  # fmt: skip
            if o.decay:
                recalled += recalled_
                read += read_
                kept += kept_
                whole += tl.sum(tl.sum(dW_t.to(o.acc) * W_t.to(o.acc), 1), 0)

        if o.erase:
            de_ = tl.sum(du.to(o.acc) * error.to(o.acc), 1)
            store_gate_gradient(de + gate_out, de_, e_slope, rows, left, o.H)
        if o.write:
            dw_ = tl.sum(du.to(o.acc) * v_.to(o.acc), 1)
            store_gate_gradient(dw + gate_out, dw_, w_slope, rows, left, o.H)
        if o.decay:
            earlier = tl.where(rows > 0, left, 0)
            a_before = load_gate(a + gate - gate_token, rows, earlier, gate_token, 1.0, o)
            dfade = read - recalled + tl.where(rows == C - 1, whole, 0.0)
            da_ = decay_gradient(dreach, kept, dfade, reach, a_before, o)
            store_gate_gradient(da + gate_out, da_, a_slope, rows, left, o.H)
