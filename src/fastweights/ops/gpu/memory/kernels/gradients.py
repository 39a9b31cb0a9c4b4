# mypy: disable-error-code="no-untyped-def"
"""Gradients of one chunk, given the state before it and the gradient of the state after it.

No product takes the transpose of another product as an operand: some versions of the compiler get that wrong on Hopper.
What is needed both ways is formed both ways, or transposed after the last product.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.common import exponential
from fastweights.ops.gpu.memory.kernels.decays import (
    LEAST,
    across,
    around_middle,
    load_logarithms,
    load_shifted,
    log_sums,
    stretched,
)
from fastweights.ops.gpu.memory.kernels.maps import raw_gradient
from fastweights.ops.gpu.memory.kernels.tiles import (
    chunk_in,
    dot,
    load_gate,
    load_rows,
    store_columns,
    store_rows,
)


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


@triton.jit(do_not_specialize=["N", "T"])
def key_decay_gradients(
    tokens,  # q, k and the log decays a (B, T, H, D), v (B, T, H, M), and e, w, each (B, T, H) or None
    cu_seqlens,  # (N + 1,) or None
    states,  # (slots, H, M, D), kept by `walk_forward`
    errors,  # (B, T, H, M), the same
    dy,  # (B, T, H, M)
    gradients,  # dq, dk and da, each (B, T, H, D)
    dstates,  # (slots, H, M, D), left by `walk_backward`
    dright,  # (B, T, H, M), the same: dR; without `o.separate` dv, which is e dR
    pairs,  # dP and G, (slots, H, planes, C, C), left by `chunk_gradients`
    left_out,  # (programs,), which programs do nothing without `o.steep`, and everything with it
    N,
    T,
    strides,  # token and head strides of q, k, v, dy and the gates
    o: tl.constexpr,
):
    """Gradients of keys, queries and log decays of one chunk and head under decays per key, for some features.

        reach = exp(a[s + 1 : t + 1].sum(0))                    # for s <= t, (D,)
        dq[t] = γ[t] * (dy @ W)[t] + sum(dP[t, s] * reach * k[s] for s in range(t + 1))
        later[t] = -γ[t] * (R @ W)[t] - sum(G[t, s] * reach * k[s] for s in range(t))
        earlier[s] = Γ[-1, s] * (U @ dW)[s] + sum(reach * (dP[t, s] * q[t] - G[t, s] * k[t]) for t in range(s, C))
        dk = later + earlier
        da = reverse_cumsum(q * dq + k * (later - earlier)) + (k * Γ[-1] * (U @ dW)).sum(0) + γ[-1] * (W * dW).sum(0)

    Pairs of tokens are gone through as in `decays.key_products`, in a launch for each of its two ways: the second takes
    many more registers.
    """
    q, k, v, a, e, w = tokens
    dq, dk, da = gradients
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, gate_token, gate_head = strides
    C: tl.constexpr = o.C
    parts: tl.constexpr = (o.D + o.block_D - 1) // o.block_D
    program = tl.program_id(0)
    head = program // parts % o.H
    slot = program // (parts * o.H)
    token, left = chunk_in(slot, N, T, cu_seqlens, o)
    if left <= 0:
        return
    rows = tl.arange(0, C)
    m = tl.arange(0, o.block_M)
    d = program % parts * o.block_D + tl.arange(0, o.block_D)
    here = (slot.to(tl.int64) * o.H + head) * o.planes
    state = (slot.to(tl.int64) * o.H + head) * o.D * o.M
    gate = token * gate_token + head * gate_head
    key = (token * o.H + head) * o.D
    value = (token * o.H + head) * o.M
    q += token * q_token * o.unit + head * q_head * o.unit
    k += token * k_token * o.unit + head * k_head * o.unit
    v += token * v_token * o.unit + head * v_head * o.unit
    dy += token * dy_token * o.unit + head * dy_head * o.unit
    q_token *= o.unit
    k_token *= o.unit
    a += key
    pairs += here * C * C

    if o.steep:
        done = tl.load(left_out + program) == 0
        if done:
            return
    a_ = load_logarithms(a, rows, left, d, o)
    if not o.steep:
        middle, first, rest, steep = around_middle(a_, o)
        tl.store(left_out + program, steep.to(tl.int32))
        if steep:
            return
    q_ = load_rows(q, rows, left, d, q_token, o.D).to(o.acc)
    k_ = load_rows(k, rows, left, d, k_token, o.D).to(o.acc)
    t = rows[:, None]
    s = rows[None, :]
    W_t = load_rows(states + state, m, o.M, d, o.D, o.D)
    dW_t = load_rows(dstates + state, m, o.M, d, o.D, o.D)
    read = dot(load_rows(dy, rows, left, m, dy_token * o.unit, o.M), W_t, o)
    recalled = read
    if o.erase:
        erase = load_gate(e + gate, rows, left, gate_token, 0.0, o)
        dR = load_rows(dright + value, rows, left, m, o.H * o.M, o.M)
        if o.separate:
            dR = dR.to(o.acc) * erase[:, None]
        recalled = dot(dR, W_t, o)
        u = load_rows(errors + value, rows, left, m, o.H * o.M, o.M).to(o.acc) * erase[:, None]
    if not o.tied:
        v_ = load_rows(v, rows, left, m, v_token * o.unit, o.M).to(o.acc)
        if o.write:
            v_ *= load_gate(w + gate, rows, left, gate_token, 0.0, o)[:, None]
        u = u + v_ if o.erase else v_
    ended = dot(u, dW_t, o)
    whole = tl.sum(dW_t.to(o.acc) * W_t.to(o.acc), 0)

    if o.steep:
        since, until, total = log_sums(a_, o)
        dq_ = tl.zeros_like(a_)
        later = tl.zeros_like(a_)
        earlier = tl.zeros_like(a_)
        reach = tl.zeros_like(a_)
        for j in range(0, 16):
            reached = load_shifted(k, rows, -j, left, d, k_token, o) * exponential(reach)
            at = pairs + rows * C + rows - j
            near = rows % 16 >= j
            dq_ += tl.load(at, near, 0.0).to(o.acc)[:, None] * reached
            if o.erase:
                later -= tl.load(at + C * C, near, 0.0).to(o.acc)[:, None] * reached
            reach += tl.maximum(load_shifted(a, rows, -j, left, d, o.H * o.D, o), LEAST)
        reach = tl.zeros_like(a_)
        for j in range(0, 16):
            at = pairs + (rows + j) * C + rows
            near = rows % 16 + j < 16
            reads = load_shifted(q, rows, j, left, d, q_token, o) * tl.load(at, near, 0.0).to(o.acc)[:, None]
            if o.erase:
                recalls = load_shifted(k, rows, j, left, d, k_token, o)
                reads -= recalls * tl.load(at + C * C, near, 0.0).to(o.acc)[:, None]
            earlier += reads * exponential(reach)
            reach += tl.maximum(load_shifted(a, rows, j + 1, left, d, o.H * o.D, o), LEAST)
        if C > 16:
            fade = exponential(since)
            remain = exponential(until)
            dq_, later, earlier = _add_gradients(dq_, later, earlier, q_, k_, fade, remain, pairs, across(t, s, 16), o)
        if C > 32:
            fade = exponential(stretched(since, total, 32, False, o))
            remain = exponential(stretched(until, total, 32, True, o))
            dq_, later, earlier = _add_gradients(dq_, later, earlier, q_, k_, fade, remain, pairs, across(t, s, 32), o)
        fade = exponential(stretched(since, total, C, False, o))
        dq_ += read * fade
        if o.erase:
            later -= recalled * fade
        ended *= exponential(stretched(until, total, C, True, o))
        earlier += ended
        last = exponential(tl.sum(total, 0))
    else:
        # As `_add_gradients` does it, with what states give under the same factors.
        fade = exponential(middle)
        remain = exponential(-middle)
        before = exponential(first)[None, :]
        after = exponential(rest)[None, :]
        at = pairs + t * C + s
        keys = (k_ * remain).to(o.operand)
        dscores = tl.load(at)
        dq_ = (read * before + dot(dscores, keys, o)) * fade
        ended *= after
        earlier = ended + dot(tl.trans(dscores), q_ * fade, o)
        later = tl.zeros_like(a_)
        if o.erase:
            dkeys = tl.load(at + C * C)
            later -= (recalled * before + dot(dkeys, keys, o)) * fade
            earlier -= dot(tl.trans(dkeys), k_ * fade, o)
        ended *= remain
        earlier *= remain
        last = exponential(first + rest)

    store_rows(dq + key, dq_, rows, left, d, o.H * o.D, o.D)
    store_rows(dk + key, later + earlier, rows, left, d, o.H * o.D, o.D)
    end = tl.sum(k_ * ended, 0) + whole * last
    da_ = tl.cumsum(q_ * dq_ + k_ * (later - earlier), 0, reverse=True) + end[None, :]
    da_ = tl.where(a_ > LEAST, da_, 0.0)
    store_rows(da + key, da_, rows, left, d, o.H * o.D, o.D)


@triton.jit
def _add_gradients(dq, later, earlier, q, k, fade, remain, pairs, reads, o: tl.constexpr):
    """Add what some pairs of tokens give, rows t, whose product of decays is that of two factors."""
    C: tl.constexpr = o.C
    at = pairs + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    keys = (k * remain).to(o.operand)
    dscores = tl.load(at, reads, 0.0)
    dq += dot(dscores, keys, o) * fade
    given = dot(tl.trans(dscores), q * fade, o)
    if o.erase:
        dkeys = tl.load(at + C * C, reads, 0.0)
        later -= dot(dkeys, keys, o) * fade
        given -= dot(tl.trans(dkeys), k * fade, o)
    earlier += given * remain
    return dq, later, earlier
