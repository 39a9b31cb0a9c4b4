# mypy: disable-error-code="no-untyped-def"
"""The forward walk: one program takes one sequence, one head and some value columns through all chunks.

Without `READ` it only carries the state along: nothing is read with q, and y is not written.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.maps import load_features
from fastweights.ops.gpu.memory.kernels.tiles import (
    at_or_above,
    dot,
    load_again,
    load_by_product,
    load_gate,
    load_turned,
    multiply,
    reach_transposed,
    resolvent,
    sequence,
    sequence_of,
    store_columns,
)


@triton.jit(do_not_specialize=["T", "keep", "given"])
def walk_forward(
    q,
    k,
    v,
    a,
    e,
    w,
    W,
    cu_seqlens,
    y,
    W_end,
    states,
    inverses,
    errors,
    T,
    keep,
    given,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
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
    PREPARED: tl.constexpr,
    READ: tl.constexpr,
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
    splits: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    # Tiles that products take from both sides are loaded for each.
    AGAIN: tl.constexpr = AHEAD and TWICE and PRECISION != "ieee" and MAP == 0
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

    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    v += first * v_token + head * v_head
    y += (first * H + head) * M
    gate = first * gate_token + head * gate_head
    state = (n.to(tl.int64) * H + head) * D * M
    W_t = tl.load(W + state + d[None, :] * M + m[:, None], in_state & (given != 0), 0.0).to(ACC)
    states += (slot * H + head) * D * M
    inverses += (slot * H + head) * C * C
    errors += (first * H + head) * M

    for start in range(0, length, C):
        left = length - start
        if READ:
            # A mask, not a branch or a variant: what inference runs is what training checks.
            tl.store(states + m[:, None] * D + d[None, :], W_t.to(states.dtype.element_ty), in_state & (keep != 0))
            states += H * D * M
        k_, k_t = load_features(
            k, rows, left, d, k_token, R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION
        )
        if AHEAD and PRECISION == "ieee":
            u = load_by_product(v, rows, left, m, v_token, C, BLOCK_M, M).to(ACC)
        else:
            u = load_turned(v, rows, left, m, v_token, M, TWICE).to(ACC)
        k_left = load_again(k_, k, rows, left, d, k_token, 1, D, AGAIN)
        if READ:
            _, q_t = load_features(
                q, rows, left, d, q_token, R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, TWICE, OPERAND, ACC, PRECISION
            )
            scores = tl.where(s <= t, dot(k_left, q_t, OPERAND, PRECISION), 0.0)
            read = dot(W_t, q_t, OPERAND, PRECISION)
        if DECAY:
            a_ = load_gate(a + gate, rows, left, gate_token, 1.0, LOGITS, ACC)
            a_next = load_gate(a + gate + gate_token, rows, tl.minimum(left, C) - 1, gate_token, 1.0, LOGITS, ACC)
            fade = tl.associative_scan(a_, 0, multiply)
            remain = tl.associative_scan(a_next, 0, multiply, reverse=True)
            reach = reach_transposed(a_, C)
            if READ:
                scores *= reach
                read *= fade[None, :]
        if WRITE:
            u *= load_gate(w + gate, rows, left, gate_token, 0.0, LOGITS, ACC)[None, :]
        if ERASE:
            e_ = load_gate(e + gate, rows, left, gate_token, 0.0, LOGITS, ACC)
            minus = e_ * -1.0
            recall = dot(W_t, k_t, OPERAND, PRECISION)
            if DECAY:
                recall *= fade[None, :]
            if PREPARED:
                Z = tl.load(inverses + s * C + t, at_or_above(s, t), 0.0)
            else:
                A = tl.where(s < t, dot(k_left, k_t, OPERAND, PRECISION), 0.0)
                if DECAY:
                    A *= reach
                Z = resolvent(A, e_, C, OPERAND, SOLVE)
                tl.store(inverses + s * C + t, Z.to(inverses.dtype.element_ty), at_or_above(s, t) & (keep != 0))
            inverses += H * C * C
            if TIED:
                error = u - recall
                error += dot(error * minus[None, :], Z, OPERAND, PRECISION)
                u = error * e_[None, :]
            else:
                error = recall * -1.0
                error += dot(error * minus[None, :] - u, Z, OPERAND, PRECISION)
                u += error * e_[None, :]
            if READ:
                store_columns(errors, error, rows, tl.where(keep != 0, left, 0), m, H * M, M)
                errors += C * H * M

        if READ:
            out = read + dot(u, scores, OPERAND, PRECISION)
            store_columns(y, out, rows, left, m, H * M, M)
        if DECAY:
            u *= remain[None, :]
            W_t *= tl.sum(tl.where(rows == C - 1, fade, 0.0), 0)
        W_t += dot(u, k_, OPERAND, PRECISION)

        q += C * q_token
        k += C * k_token
        v += C * v_token
        y += C * H * M
        gate += C * gate_token

    tl.store(W_end + state + d[None, :] * M + m[:, None], W_t, in_state)


@triton.jit(do_not_specialize=["N", "T"])
def invert_chunks(
    k,
    a,
    e,
    cu_seqlens,
    inverses,
    N,
    T,
    k_token,
    k_head,
    gate_token,
    gate_head,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    GATHER: tl.constexpr,
    LOGITS: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
):
    """Z of one chunk and head, as a tile of rows s; chunks run side by side, off the walk's path."""
    k_token *= UNIT
    k_head *= UNIT
    program = tl.program_id(0)
    head = program % H
    slot = program // H
    n = sequence_of(slot, N, cu_seqlens, C) if PACKED else slot // tl.cdiv(T, C)
    first, length, first_slot = sequence(n, T, cu_seqlens, C, PACKED)
    start = (slot - first_slot) * C
    left = (length - start).to(tl.int32)
    if left <= 0:
        return
    token = first + start
    k += token * k_token + head * k_head
    gate = token * gate_token + head * gate_head
    rows = tl.arange(0, C)
    s = rows[:, None]
    t = rows[None, :]
    e_ = load_gate(e + gate, rows, left, gate_token, 0.0, LOGITS, ACC)
    keys = tl.zeros((C, C), ACC)
    for f in range(0, D, BLOCK_D):
        d = f + tl.arange(0, BLOCK_D)
        k_, k_t = load_features(
            k, rows, left, d, k_token, R, D, BLOCK_R, BLOCK_D, MAP, SUM, GATHER, False, OPERAND, ACC, PRECISION
        )
        keys += dot(k_, k_t, OPERAND, PRECISION)
    A = tl.where(s < t, keys, 0.0)
    if DECAY:
        A *= reach_transposed(load_gate(a + gate, rows, left, gate_token, 1.0, LOGITS, ACC), C)
    Z = resolvent(A, e_, C, OPERAND, SOLVE)
    inverses += (slot.to(tl.int64) * H + head) * C * C
    tl.store(inverses + s * C + t, Z.to(inverses.dtype.element_ty), at_or_above(s, t))
