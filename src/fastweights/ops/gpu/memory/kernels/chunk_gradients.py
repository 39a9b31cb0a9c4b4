# mypy: disable-error-code="no-untyped-def"
"""Gradients of chunks side by side, from what the walk back left.

All tiles have tokens as rows, so that a sum of products is one accumulator and nothing is transposed after a product:
what is needed both ways, tokens that read by tokens that are read and the other way round, is formed both ways.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.decays import (
    decay_logarithms,
    decay_sums,
    decay_total,
    gradient_from_ends,
    gradient_from_reach,
    power,
    power_between,
    reach,
    sums_before,
)
from fastweights.ops.gpu.memory.kernels.gradients import store_gate_gradient
from fastweights.ops.gpu.memory.kernels.maps import gate_slope, load_features, load_raw, raw_gradient
from fastweights.ops.gpu.memory.kernels.tiles import (
    dot,
    in_entries,
    load_both,
    load_gate,
    load_rows,
    sequence,
    sequence_of,
    store_rows,
)


@triton.jit(do_not_specialize=["N", "T"])
def chunk_gradients(
    tokens,  # q and k (B, T, H, R), v (B, T, H, M), and the gates a, e, w, each (B, T, H) or None
    cu_seqlens,  # (N + 1,) or None
    states,  # (slots, H, M, D), kept by `walk_forward`
    errors,  # (B, T, H, M), the same
    dy,  # (B, T, H, M)
    gradients,  # dq and dk (B, T, H, R), dv (B, T, H, M), and da, de, dw, each (B, T, H) or None
    dstates,  # (slots, H, M, D), left by `walk_backward`
    dright,  # (B, T, H, M), the same: dR, which may stand where dv will
    pairs,  # with decays per key, dP and G for `key_decay_gradients`, (slots, H, planes, C, C)
    N,
    T,
    strides,  # token and head strides of q, k, v, dy and the gates
    o: tl.constexpr,
):
    """Every gradient of some chunks of one head but those of states; programs run side by side.

        de, dw = (dR * E).sum(1), (dR * v).sum(1)
        dv = dR * w                                             # e where one gate erases and writes
        U = E * e                                               # then; else E * e + v * w
        R = dR * e
        dP, G = (dy @ U.T * Γ).tril(), (R @ U.T * Γ).tril(-1)
        dq = dy @ W * γ + dP @ k
        dk = U @ dW * Γ[-1] - R @ W * γ + dP.T @ q - (G + G.T) @ k
        dΓ = dy @ U.T * (q @ k.T) - R @ U.T * (k @ k.T)
        da = `gradient_from_reach` + `gradient_from_ends`

    With more than one chunk a program, loads run ahead as they do in a walk. Decays per key leave what follows dP and G
    to `key_decay_gradients`; both are then without Γ.
    """
    C: tl.constexpr = o.C
    q, k, v, a, e, w = tokens
    dq, dk, dv, da, de, dw = gradients
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, gate_token, gate_head = in_entries(strides, o)
    program = tl.program_id(0)
    head = program % o.H
    rows = tl.arange(0, C)
    m = tl.arange(0, o.block_M)
    features = tl.arange(0, o.block_D)
    s = rows[:, None]
    t = rows[None, :]
    WHOLE: tl.constexpr = o.block_D >= o.D
    SCALED: tl.constexpr = o.tied or (o.write and not o.erase)
    # Operands of float32 take many registers: long ones are not held, and what is needed both ways is transposed. The
    # compiler gets that right, since tiles of so few tokens are not multiplied by groups of warps.
    WIDE: tl.constexpr = o.precision != "ieee" and o.block_M >= 64
    for i in range(0, o.chunks_per_program):
        if o.packed:
            slot = program // o.H * o.chunks_per_program + i
            n = sequence_of(slot, N, cu_seqlens, C)
        else:
            # First all first chunks: what the walk back has touched last may still be in the cache.
            n = program // o.H % N
            slot = n * tl.cdiv(T, C) + program // o.H // N * o.chunks_per_program + i
        first, length, first_slot = sequence(n, T, cu_seqlens, C, o)
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

        at = (token * o.H + head) * o.M
        dy_, dy_t = load_both(dy + token * dy_token + head * dy_head, rows, left, m, dy_token, o.M, o.both_ways)
        dR, dR_t = load_both(dright + at, rows, left, m, o.H * o.M, o.M, o.both_ways)
        erase = load_gate(e + gate, rows, left, gate_token, 0.0, o) if o.erase else rows
        write = load_gate(w + gate, rows, left, gate_token, 0.0, o) if o.write else erase
        # What is written is `scale` times something from memory, but for two gates that both write.
        scale = erase if o.tied else write
        if o.erase:
            U, U_t = load_both(errors + at, rows, left, m, o.H * o.M, o.M, o.both_ways)
        if not o.tied:
            v_, v_t = load_both(v + token * v_token + head * v_head, rows, left, m, v_token, o.M, o.both_ways)
            if o.erase:
                de_ = tl.sum(dR.to(o.acc) * U.to(o.acc), 1)
                U = U.to(o.acc) * erase[:, None] + v_.to(o.acc) * (write[:, None] if o.write else 1.0)
                U = U.to(o.operand)
                U_t = tl.trans(U)
            else:
                U, U_t = v_, v_t
        if o.write:
            dw_ = tl.sum(dR.to(o.acc) * v_.to(o.acc), 1)
            slope = gate_slope(w + gate, rows, left, gate_token, o)
            store_gate_gradient(dw + gate_out, dw_, slope, rows, left, o.H)
        if not WIDE:
            _store_values(dv + at, dR, scale if SCALED else write, rows, left, m, o)
        if WHOLE and not o.per_key:
            k_, k_t = load_features(k_at, rows, left, features, k_token, o)
            q_ = load_features(q_at, rows, left, features, q_token, o)[0]

        # Tokens t that read as rows, and what the gradient of Γ is formed of; then tokens s that are read.
        dscores_t = dot(dy_, U_t, o)
        dscores_s = tl.trans(dscores_t) if WIDE and not o.per_key else dscores_t
        if SCALED:
            dscores_t *= scale[None, :]
        if o.decay:
            a_ = load_gate(a + gate, rows, left, gate_token, 1.0, o)
            logarithms = decay_logarithms(a_, o)
            sums = decay_sums(logarithms)
            between = reach(dscores_t, sums_before(sums, logarithms), sums, True, 0, C)
            products = tl.zeros((C, C), o.acc)
            for f in range(0, o.D, o.block_D):
                if not WHOLE:
                    k_t = load_features(k_at, rows, left, f + features, k_token, o)[1]
                    q_ = load_features(q_at, rows, left, f + features, q_token, o)[0]
                products += dot(q_, k_t, o)
            dreach = dscores_t * products
            dscores_t *= tl.where(s == t, 1.0, between * a_[:, None])
        else:
            dscores_t = tl.where(s >= t, dscores_t, 0.0)
        dscores_t = dscores_t.to(o.operand)
        if o.erase:
            dkeys_t = dot(dR, U_t, o)
            dkeys = tl.trans(dkeys_t) if WIDE and not o.per_key else dkeys_t
            if o.tied:
                de_ = tl.sum(tl.where(s == t, dkeys_t, 0.0), 1)
            slope = gate_slope(e + gate, rows, left, gate_token, o)
            store_gate_gradient(de + gate_out, de_, slope, rows, left, o.H)
            dkeys_t *= erase[:, None]
            if SCALED:
                dkeys_t *= scale[None, :]
            if o.decay:
                products = tl.zeros((C, C), o.acc)
                for f in range(0, o.D, o.block_D):
                    if not WHOLE:
                        k_, k_t = load_features(k_at, rows, left, f + features, k_token, o)
                    products += dot(k_, k_t, o)
                dreach -= dkeys_t * products
                dkeys_t *= between * a_[:, None]
        if o.per_key:
            pair = pairs + (slot.to(tl.int64) * o.H + head) * o.planes * C * C + s * C + t
            there = (s < C) & (left > 0)
            tl.store(pair, dscores_t, there)
            if o.erase:
                tl.store(pair + C * C, tl.where(s > t, dkeys_t, 0.0).to(o.operand), there)
        if o.decay:
            fading = reach(dreach, sums, sums, False, 1, C)
            da_ = gradient_from_reach(dreach, fading, between, o)
        if not o.per_key:
            if not WIDE:
                dscores_s = dot(U, dy_t, o)
            if SCALED:
                dscores_s *= scale[:, None]
            dscores_s = dscores_s * fading if o.decay else tl.where(s <= t, dscores_s, 0.0)
            dscores_s = dscores_s.to(o.operand)
            if o.erase:
                if not WIDE:
                    dkeys = dot(U, dR_t, o)
                dkeys *= erase[None, :]
                if SCALED:
                    dkeys *= scale[:, None]
                if o.decay:
                    dkeys = tl.where(s == t, 0.0, dkeys * fading + dkeys_t)
                else:
                    dkeys = tl.where(s < t, dkeys, tl.where(s > t, dkeys_t, 0.0))
                dkeys = (dkeys * -1.0).to(o.operand)

            fade = erase
            remain = scale
            if o.decay:
                fade = power(sums)
                remain = power_between(decay_total(logarithms), sums)
                recalled = tl.zeros((C,), o.acc)
                read = tl.zeros((C,), o.acc)
                kept = tl.zeros((C,), o.acc)
                whole = tl.zeros((), o.acc)
                if SCALED:
                    remain *= scale
            for f in range(0, o.D, o.block_D):
                d = f + features
                W_t = load_rows(states + state, m, states_there, d, o.D, o.D)
                if not WHOLE:
                    k_ = load_features(k_at, rows, left, d, k_token, o)[0]
                    q_ = load_features(q_at, rows, left, d, q_token, o)[0]
                if WIDE:
                    dy_ = load_rows(dy + token * dy_token + head * dy_head, rows, left, m, dy_token, o.M)
                dq_ = dot(dy_, W_t, o)
                if o.decay:
                    read += tl.sum(dq_ * q_.to(o.acc), 1)
                    dq_ *= fade[:, None]
                dq_ += dot(dscores_t, k_, o)
                _store(dq + key_at, dq_, q_at, rows, left, d, q_token, o)
                dW_t = load_rows(dstates + state, m, states_there, d, o.D, o.D)
                if WIDE and SCALED:
                    U = load_rows(errors + at, rows, left, m, o.H * o.M, o.M) if o.erase else v_
                dk_ = dot(U, dW_t, o)
                if o.decay:
                    kept += tl.sum(dk_ * k_.to(o.acc), 1)
                    whole += tl.sum(dW_t.to(o.acc) * W_t.to(o.acc))
                if o.decay or SCALED:
                    dk_ *= remain[:, None]
                if o.erase:
                    if WIDE:
                        dR = load_rows(dright + at, rows, left, m, o.H * o.M, o.M)
                    less = dot(dR, W_t, o)
                    if o.decay:
                        recalled += tl.sum(less * k_.to(o.acc), 1)
                    dk_ -= less * (fade * erase if o.decay else erase)[:, None]
                    dk_ += dot(dkeys, k_, o)
                dk_ += dot(dscores_s, q_, o)
                _store(dk + key_at, dk_, k_at, rows, left, d, k_token, o)

        if WIDE:
            dR = load_rows(dright + at, rows, left, m, o.H * o.M, o.M)
            _store_values(dv + at, dR, scale if SCALED else write, rows, left, m, o)
        if o.decay:
            if SCALED:
                kept *= scale
            dfade = read - recalled * erase if o.erase else read
            dfade += tl.where(rows == C - 1, whole, 0.0)
            da_ += gradient_from_ends(a_, kept, dfade, sums, logarithms, o)
            store_gate_gradient(da + gate_out, da_, gate_slope(a + gate, rows, left, gate_token, o), rows, left, o.H)


@triton.jit
def _store_values(dv, dR, scale, rows, left, columns, o: tl.constexpr):
    """Write the gradient of the values, for which others may have to read dR first: it stands there."""
    tl.debug_barrier()
    if o.tied or o.write:
        store_rows(dv, dR.to(o.acc) * scale[:, None], rows, left, columns, o.H * o.M, o.M)
    elif o.separate:
        store_rows(dv, dR, rows, left, columns, o.H * o.M, o.M)


@triton.jit
def _store(dx, dphi, x, rows, left, columns, stride, o: tl.constexpr):
    """Go back through the feature map of the keys or queries at x, if there is one, and write their gradient."""
    raw = dphi
    if o.map != "none":
        columns = tl.arange(0, o.block_R)
        raw = load_raw(x, rows, left, stride, 1, o)
    gradient = raw_gradient(dphi, rows, x, raw, rows, left, stride, 1, False, o)
    store_rows(dx, gradient, rows, left, columns, o.H * o.R, o.R)
