# mypy: disable-error-code="no-untyped-def"
"""The walk back through all chunks: the gradient of the state, and with `o.fused` every other gradient on the way.

Without it a program takes some value columns only, and leaves the gradient of the state after each chunk and that of
the right side of the equation for U to `chunk_gradients`; with `o.only_state` it leaves nothing but the gradient of the
first state.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.decays import (
    decay_logarithms,
    decay_sums,
    fades,
    gradient_from_ends,
    reach,
    sums_before,
)
from fastweights.ops.gpu.memory.kernels.gradients import (
    key_gradients,
    score_gradients,
    store_gate_gradient,
    store_key_gradients,
)
from fastweights.ops.gpu.memory.kernels.maps import gate_slope, load_features, load_raw, mapped, one_over_sum
from fastweights.ops.gpu.memory.kernels.tiles import (
    at_or_above,
    dot,
    in_entries,
    load_again,
    load_both,
    load_by_product,
    load_gate,
    load_rows,
    load_transposed,
    product,
    sequence,
    store_columns,
)


@triton.jit(do_not_specialize=["T", "final", "wanted"])
def walk_backward(
    tokens,  # q and k (B, T, H, R), v (B, T, H, M), and the gates a, e, w, each (B, T, H) or None
    remaining,  # as `walk_forward` takes it
    cu_seqlens,  # (N + 1,) or None
    saved,  # as `walk_forward` takes it
    dy,  # (B, T, H, M)
    dW_end,  # (N, H, D, M)
    gradients,  # dq and dk (B, T, H, R), dv (B, T, H, M), and da, de, dw, each (B, T, H) or None
    dW,  # (N, H, D, M), of the first state
    dstates,  # (slots, H, M, D), for `chunk_gradients`: of the state after each chunk
    dright,  # (B, T, H, M), for `chunk_gradients`: dR
    T,
    final,
    wanted,
    strides,  # token and head strides of q, k, v, dy and the gates
    o: tl.constexpr,
):
    """Take the gradient of one head's state, for some value columns, back through all chunks of a sequence.

    dW_end is read where it is `final`, else zero; dW is written where it is `wanted`. A chunk, with states and values
    transposed as the code has them:

        P = (q @ k.T * Γ).tril()                                # scores, rows t
        dU = dW @ k.T * Γ[-1] + dy.T @ P
        dR = dU - (dU * e) @ Z.T
        if fused:                                               # else by `chunk_gradients`
            dv = dR * w                                         # e where one gate erases and writes
            dscores, dkeys = `score_gradients`
            dq, dk = `key_gradients`
            de, dw, da = (dR * E.T).sum(0), (dR * v.T).sum(0), as in `chunk_gradients`
        dW = dW * γ[-1] + (dy.T * γ) @ q - (dR * e * γ) @ k

    Decays per key come with keys and queries, as in `walk_forward`.
    """
    C: tl.constexpr = o.C
    q, k, v, a, e, w = tokens
    k_rest, last_rest = remaining
    states, tiles, errors = saved
    dq, dk, dv, da, de, dw = gradients
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, gate_token, gate_head = in_entries(strides, o)
    splits: tl.constexpr = (o.M + o.block_M - 1) // o.block_M
    # Tiles that products take from both sides are loaded for each.
    AGAIN: tl.constexpr = o.prefetch and o.both_ways and o.precision != "ieee" and o.map == "none"
    # A product that is needed anyway has the sums for the gate's gradient on its diagonal.
    DIAGONAL: tl.constexpr = o.prefetch and o.tied
    KNOWN: tl.constexpr = o.prefetch and o.map != "none" and o.sum
    SOLVE: tl.constexpr = "tf32" if o.solve == "16-bit" else o.solve
    program = tl.program_id(0)
    head = (program // splits) % o.H
    n = program // (splits * o.H)
    first, length, slot = sequence(n, T, cu_seqlens, C * o.steps, o)
    tile = sequence(n, T, cu_seqlens, C, o)[2]

    rows = tl.arange(0, C)
    s = rows[:, None]
    t = rows[None, :]
    d = tl.arange(0, o.block_D)
    m = (program % splits) * o.block_M + tl.arange(0, o.block_M)
    in_state = (m[:, None] < o.M) & (d[None, :] < o.D)
    state = (n.to(tl.int64) * o.H + head) * o.D * o.M
    dW_t = tl.load(dW_end + state + d[None, :] * o.M + m[:, None], in_state & (final != 0), 0.0).to(o.acc)

    count = tl.cdiv(length, C)
    token = first + (count - 1) * C
    left = length - (count - 1) * C
    for i in range(0, count):
        step = count - 1 - i
        chunk = (slot + step // o.steps) * o.H + head
        gate = token * gate_token + head * gate_head
        gate_out = token * o.H + head
        q_at = q + token * q_token + head * q_head
        k_at = k + token * k_token + head * k_head
        q_, q_t = load_features(q_at, rows, left, d, q_token, o)
        k_, k_t = load_features(k_at, rows, left, d, k_token, o)
        if o.per_key:
            rest = (token * o.H + head) * o.D
            k_t = load_transposed(k_rest + rest, rows, left, d, o.H * o.D, o.D, o.both_ways)
            last_key = tl.load(last_rest + ((tile + step) * o.H + head) * o.D + d, d < o.D, 0.0)
        dy_at = dy + token * dy_token + head * dy_head
        dy_t = load_transposed(dy_at, rows, left, m, dy_token, o.M, o.both_ways)
        q_left = load_again(q_, q_at, rows, left, d, q_token, 1, o.D, AGAIN)
        state_at = chunk * o.D * o.M
        here = state_at + m[:, None] * o.D + d[None, :]
        tiles_at = tiles + ((tile + step) * o.H + head) * o.planes * C * C
        # Coefficients that are not there cost nothing: the products they stand in are skipped.
        fade = tl.full((C,), 1.0, o.acc)
        remain = tl.full((C,), 1.0, o.acc)
        erase = tl.full((C,), 0.0, o.acc)
        write = tl.full((C,), 1.0, o.acc)
        last = 1.0
        if o.erase:
            erase = load_gate(e + gate, rows, left, gate_token, 0.0, o)
            Z = _load_turned(tiles_at, o)
        if o.tied:
            write = erase
        if o.write:
            write = load_gate(w + gate, rows, left, gate_token, 0.0, o)
        if o.fused:
            # What gradients go back through at the end: loaded there, it would be waited for.
            q_raw = q_
            k_raw = k_
            q_scale = erase
            if KNOWN:
                # The compiler finds that this was formed before. From q_raw it would be another sum, over more lanes.
                raw = load_raw(q_at, rows, left, q_token, 1, o)
                phi = mapped(q_at, raw, rows, left, q_token, 1, o)
                q_scale = tl.sum(one_over_sum(phi, 1, o), 1)
            if o.map != "none":
                if o.prefetch and o.map != "dpfp" and o.precision == "ieee":
                    q_raw = load_by_product(q_at, rows, left, tl.arange(0, o.block_R), q_token, C, o.block_R, o.R)
                else:
                    q_raw = load_raw(q_at, rows, left, q_token, 0, o)
                k_raw = load_raw(k_at, rows, left, k_token, 1, o)
            if o.decay:
                a_slope = gate_slope(a + gate, rows, left, gate_token, o)
            if o.erase:
                e_slope = gate_slope(e + gate, rows, left, gate_token, o)
            if o.write:
                w_slope = gate_slope(w + gate, rows, left, gate_token, o)
            W = load_transposed(states + state_at, m, o.M, d, o.D, o.D, o.both_ways)
            error = dy_t
            if o.erase:
                error_at = errors + token * o.H * o.M + head * o.M
                if DIAGONAL:
                    error = load_rows(error_at, rows, left, m, o.H * o.M, o.M)
                else:
                    error, error_t = load_both(error_at, rows, left, m, o.H * o.M, o.M, o.both_ways)
            k_t_left = load_again(k_t, k_at, rows, left, d, k_token, 0, o.D, AGAIN)
            dy_t_right = load_again(dy_t, dy_at, rows, left, m, dy_token, 0, o.M, AGAIN)
            if not o.tied:
                v_, v_t = load_both(v + token * v_token + head * v_head, rows, left, m, v_token, o.M, o.both_ways)

        scores = _load_turned(tiles_at + (o.planes - 1) * C * C, o) if o.prepared else dot(q_left, k_t, o)
        du = dot(dW_t, k_t, o)
        if o.decay:
            a_ = load_gate(a + gate, rows, left, gate_token, 1.0, o)
            fade, remain, last = fades(a_, o)
            du *= remain[None, :]
            if o.fused or not o.prepared:
                logarithms = decay_logarithms(a_, o)
                sums = decay_sums(logarithms)
        if not o.prepared:
            if o.decay:
                scores *= reach(scores, sums, sums, False, 0, C)
            elif C == 64:
                # So many predicates do not fit in registers of theirs.
                scores *= (s >= t).to(o.acc)
            else:
                scores = tl.where(s >= t, scores, 0.0)
        du += dot(dy_t, scores, o)
        # e dR: the gradient of what is not recalled; that of the values where one gate does both.
        drest = du
        if o.erase:
            du += dot(du * (erase * -1.0)[None, :], Z, o)
            drest = du * erase[None, :]
        if o.fused:
            dv_at = dv + token * o.H * o.M + head * o.M
            if o.tied:
                store_columns(dv_at, drest, rows, left, m, o.H * o.M, o.M)
            elif o.write:
                store_columns(dv_at, du * write[None, :], rows, left, m, o.H * o.M, o.M)
            else:
                store_columns(dv_at, du, rows, left, m, o.H * o.M, o.M)
            # Rounded once, as the operand it is below.
            rounded = (du if DIAGONAL else drest).to(o.operand)
            keys = erase
            scores = erase
            fading = erase
            if o.decay:
                scores = dot(k_, q_t, o)
                fading = reach(scores, sums, sums, False, 1, C)
                if o.erase:
                    keys = dot(k_, k_t, o)
            if o.tied:
                u = error.to(o.acc) * erase[:, None]
            else:
                u = v_.to(o.acc) * write[:, None]
                if o.erase:
                    u += error.to(o.acc) * erase[:, None]
            u = u.to(o.operand)
            dscores, dkeys, dreach, de_ = score_gradients(
                u, error, dy_t_right, rounded, erase, scores, keys, fading, DIAGONAL, o
            )
            dq_t, dk_, recalled, read, kept = key_gradients(
                q_, q_t, k_, k_t_left, W, dW_t, u, dy_t_right, rounded, erase, dscores, dkeys, fade, remain, DIAGONAL, o
            )
            key_at = gate_out * o.R
            store_key_gradients(
                dq + key_at, dk + key_at, dq_t, dk_, q_scale, q_at, k_at, q_raw, k_raw,
                rows, left, d, q_token, k_token, KNOWN, o,
            )  # fmt: skip
            if o.erase:
                if not DIAGONAL:
                    de_ = tl.sum(du * error_t.to(o.acc), 0)
                store_gate_gradient(de + gate_out, de_, e_slope, rows, left, o.H)
            if o.write:
                dw_ = tl.sum(du * v_t.to(o.acc), 0)
                store_gate_gradient(dw + gate_out, dw_, w_slope, rows, left, o.H)
            if o.decay:
                W_t = tl.load(states + here, in_state, 0.0)
                whole = tl.sum(tl.sum(dW_t * W_t.to(o.acc), 1), 0)
                dfade = read - recalled + tl.where(rows == C - 1, whole, 0.0)
                # Rows s: everything the other way round, Γ^T in place of Γ.
                between = reach(dreach, sums_before(sums, logarithms), sums, True, 1, C)
                after = reach(dreach, sums, sums, False, 0, C)
                # Small heads have few terms to average 16-bit roundings over.
                turned = product(tl.where(s <= t, dreach, 0.0), after, o.acc, SOLVE)
                da_ = tl.sum(turned * between, 0)
                da_ += gradient_from_ends(a_, kept, dfade, sums, logarithms, o)
                store_gate_gradient(da + gate_out, da_, a_slope, rows, left, o.H)
        elif not o.only_state:
            if o.steps == 1 or step % o.steps == o.steps - 1 or i == 0:
                tl.store(dstates + here, dW_t.to(dstates.dtype.element_ty), in_state)
            store_columns(dright + token * o.H * o.M + head * o.M, du, rows, left, m, o.H * o.M, o.M)

        if o.decay:
            dW_t *= last
            dy_t = dy_t.to(o.acc) * fade[None, :]
            drest *= fade[None, :]
        if o.per_key:
            dW_t *= last_key[None, :]
        dW_t += dot(dy_t, q_, o)
        if o.erase:
            dW_t += dot(drest * -1.0, k_, o)
        token -= C
        left += C

    tl.store(dW + state + d[None, :] * o.M + m[:, None], dW_t, in_state & (wanted != 0))


@triton.jit
def _load_turned(tile, o: tl.constexpr):
    """The transpose of a tile (C, C) whose blocks of 16 below the diagonal are not written."""
    s = tl.arange(0, o.C)[:, None]
    t = tl.arange(0, o.C)[None, :]
    if o.both_ways:
        turned = tl.load(tile + t * o.C + s, at_or_above(t, s), 0.0)
    else:
        turned = tl.trans(tl.load(tile + s * o.C + t, at_or_above(s, t), 0.0))
    return turned
