# mypy: disable-error-code="no-untyped-def"
"""The forward walk, what is prepared for it, and the states between groups that are walked side by side.

Without `o.read` a walk only carries the state along: nothing is read with q, and y is not written.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.decays import (
    decay_logarithms,
    decay_sums,
    fades,
    key_products,
    reach,
)
from fastweights.ops.gpu.memory.kernels.maps import load_features
from fastweights.ops.gpu.memory.kernels.tiles import (
    at_or_above,
    chunk_in,
    dot,
    in_entries,
    load_again,
    load_by_product,
    load_gate,
    load_rows,
    load_transposed,
    product,
    resolvent,
    sequence,
    store_columns,
    store_rows,
)


@triton.jit(do_not_specialize=["T", "keep", "given"])
def walk_forward(
    tokens,  # q and k (B, T, H, R), v (B, T, H, M), and the gates a, e, w, each (B, T, H) or None
    remaining,  # with decays per key, k * Γ[-1] (B, T, H, D) and γ[-1] of each step (slots, H, D)
    W,  # (N, H, D, M), the first state
    cu_seqlens,  # (N + 1,) or None
    outputs,  # y (B, T, H, M) and W_end (N, H, D, M)
    saved,  # states before each chunk (slots, H, M, D), its Z and P (slots, H, planes, C, C), and E (B, T, H, M)
    T,
    keep,
    given,
    strides,  # token and head strides of q, k, v and the gates
    o: tl.constexpr,
):
    """Take one sequence, one head and some value columns through all chunks.

    With `keep` the states, tiles and errors are written; W is read where it is `given`, else zero. A chunk, with
    states and values transposed as the code has them (Γ and γ as in docs/kernels.md, all 1 without decay):

        states[slot] = W                                        # (M, D)
        P = (k @ q.T * Γ.T).triu()                              # scores, rows s; read where `prepared`, as is Z
        A = (k @ k.T * Γ.T).triu(1)
        Z = inverse(I + A * e) @ A                              # `resolvent`
        H = v.T - W @ k.T * γ                                   # one gate erases and writes; else -W @ k.T * γ
        E = H - (H * e) @ Z                                     # else H - (H * e + v.T * w) @ Z
        U = E * e                                               # else E * e + v.T * w
        y = W @ q.T * γ + U @ P
        W = W * γ[-1] + (U * Γ[-1]) @ k

    With decays per key, Γ and γ have D features and stand beside k and q: these come as q * γ, k * γ and k * Γ[-1].
    """
    C: tl.constexpr = o.C
    q, k, v, a, e, w = tokens
    y, W_end = outputs
    states, tiles, errors = saved
    k_rest, last_rest = remaining
    q_token, q_head, k_token, k_head, v_token, v_head, gate_token, gate_head = in_entries(strides, o)
    splits: tl.constexpr = (o.M + o.block_M - 1) // o.block_M
    # Tiles that products take from both sides are loaded for each.
    AGAIN: tl.constexpr = o.prefetch and o.both_ways and o.precision != "ieee" and o.map == "none"
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

    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    v += first * v_token + head * v_head
    y += (first * o.H + head) * o.M
    gate = first * gate_token + head * gate_head
    state = (n.to(tl.int64) * o.H + head) * o.D * o.M
    W_t = tl.load(W + state + d[None, :] * o.M + m[:, None], in_state & (given != 0), 0.0).to(o.acc)
    states += (slot * o.H + head) * o.D * o.M
    tiles += (tile * o.H + head) * o.planes * C * C
    errors += (first * o.H + head) * o.M
    if o.per_key:
        k_rest += (first * o.H + head) * o.D
        last_rest += (tile * o.H + head) * o.D
    # Values are no operands, which the compiler would copy ahead: they are loaded a chunk ahead here.
    CARRY: tl.constexpr = o.prepared and not o.prefetch
    v_next = load_rows(v, rows, length, m, v_token, o.M) if CARRY else rows

    for start in range(0, length, C):
        left = length - start
        if o.read:
            state_at = states + m[:, None] * o.D + d[None, :]
            if o.steps == 1 or start % (C * o.steps) == 0:
                # A mask, not a branch or a variant: what inference runs is what training checks.
                tl.store(state_at, W_t.to(states.dtype.element_ty), in_state & (keep != 0))
                states += o.H * o.D * o.M
        k_, k_t = load_features(k, rows, left, d, k_token, o)
        if CARRY:
            u = tl.trans(v_next).to(o.acc)
            v_next = load_rows(v + C * v_token, rows, left - C, m, v_token, o.M)
        elif o.prefetch and o.precision == "ieee":
            u = load_by_product(v, rows, left, m, v_token, C, o.block_M, o.M).to(o.acc)
        else:
            u = load_transposed(v, rows, left, m, v_token, o.M, o.both_ways).to(o.acc)
        k_left = load_again(k_, k, rows, left, d, k_token, 1, o.D, AGAIN and not o.prepared)
        if o.read:
            _, q_t = load_features(q, rows, left, d, q_token, o)
            if o.prepared:
                scores = tl.load(tiles + (o.planes - 1) * C * C + s * C + t, at_or_above(s, t), 0.0)
            else:
                scores = tl.where(s <= t, dot(k_left, q_t, o), 0.0)
            read = dot(W_t, q_t, o)
        if o.decay:
            a_ = load_gate(a + gate, rows, left, gate_token, 1.0, o)
            fade, remain, last = fades(a_, o)
            if not o.prepared:
                sums = decay_sums(decay_logarithms(a_, o))
            if o.read:
                if not o.prepared:
                    scores *= reach(scores, sums, sums, False, 1, C)
                read *= fade[None, :]
        if o.write:
            u *= load_gate(w + gate, rows, left, gate_token, 0.0, o)[None, :]
        if o.erase:
            e_ = load_gate(e + gate, rows, left, gate_token, 0.0, o)
            minus = e_ * -1.0
            recall = dot(W_t, k_t, o)
            if o.decay:
                recall *= fade[None, :]
            if o.prepared:
                Z = tl.load(tiles + s * C + t, at_or_above(s, t), 0.0)
            else:
                A = tl.where(s < t, dot(k_left, k_t, o), 0.0)
                if o.decay:
                    A *= reach(A, sums, sums, False, 1, C)
                Z = resolvent(A, e_, o)
                tl.store(tiles + s * C + t, Z.to(tiles.dtype.element_ty), at_or_above(s, t) & (keep != 0))
            if o.tied:
                error = u - recall
                error += dot(error * minus[None, :], Z, o)
                u = error * e_[None, :]
            else:
                error = recall * -1.0
                error += dot(error * minus[None, :] - u, Z, o)
                u += error * e_[None, :]
            if o.read:
                store_columns(errors, error, rows, tl.where(keep != 0, left, 0), m, o.H * o.M, o.M)
                errors += C * o.H * o.M

        if o.read:
            out = read + dot(u, scores, o)
            store_columns(y, out, rows, left, m, o.H * o.M, o.M)
        if o.decay:
            u *= remain[None, :]
            W_t *= last
        if o.per_key:
            k_ = load_rows(k_rest, rows, left, d, o.H * o.D, o.D)
            W_t *= tl.load(last_rest + d, d < o.D, 0.0)[None, :]
            k_rest += C * o.H * o.D
            last_rest += o.H * o.D
        W_t += dot(u, k_, o)

        q += C * q_token
        k += C * k_token
        v += C * v_token
        y += C * o.H * o.M
        tiles += o.H * o.planes * C * C
        gate += C * gate_token

    tl.store(W_end + state + d[None, :] * o.M + m[:, None], W_t, in_state)


@triton.jit(do_not_specialize=["N", "T"])
def prepare_chunks(
    q,  # (B, T, H, R)
    k,  # (B, T, H, R)
    gates,  # a, e, each (B, T, H) or None; with decays per key, a (B, T, H, D)
    cu_seqlens,  # (N + 1,) or None
    tiles,  # (slots, H, planes, C, C)
    faded,  # with decays per key, q * γ, k * γ and k * Γ[-1], each (B, T, H, D), and γ[-1] (slots, H, D)
    N,
    T,
    strides,  # token and head strides of q, k and the gates
    o: tl.constexpr,
):
    """Z and P of one chunk and head, as tiles of rows s; chunks run side by side, off the walk's path.

    A = (k @ k.T * Γ.T).triu(1)
    tiles[slot] = inverse(I + A * e) @ A, (k @ q.T * Γ.T).triu()    # the second alone where the rule does not erase
    """
    C: tl.constexpr = o.C
    a, e = gates
    q_token, q_head, k_token, k_head, gate_token, gate_head = in_entries(strides, o)
    program = tl.program_id(0)
    head = program % o.H
    slot = program // o.H
    token, left = chunk_in(slot, N, T, cu_seqlens, o)
    if left <= 0:
        return
    q += token * q_token + head * q_head
    k += token * k_token + head * k_head
    gate = token * gate_token + head * gate_head
    tiles += (slot.to(tl.int64) * o.H + head) * o.planes * C * C
    rows = tl.arange(0, C)
    s = rows[:, None]
    t = rows[None, :]
    scores = tl.zeros((C, C), o.acc)
    keys = tl.zeros((C, C), o.acc)
    for f in range(0, o.D, o.block_D):
        d = f + tl.arange(0, o.block_D)
        if o.per_key:
            key = (token * o.H + head) * o.D
            scores, keys, q_, k_, rest, last = key_products(
                scores, keys, q, k, a + key, rows, left, d, q_token, k_token, o
            )
            q_faded, k_faded, k_rest, last_rest = faded
            store_rows(q_faded + key, q_, rows, left, d, o.H * o.D, o.D)
            if o.erase:
                store_rows(k_faded + key, k_, rows, left, d, o.H * o.D, o.D)
            store_rows(k_rest + key, rest, rows, left, d, o.H * o.D, o.D)
            tl.store(last_rest + (slot.to(tl.int64) * o.H + head) * o.D + d, last, d < o.D)
        else:
            k_, k_t = load_features(k, rows, left, d, k_token, o)
            _, q_t = load_features(q, rows, left, d, q_token, o)
            scores += dot(k_, q_t, o)
            if o.erase:
                keys += dot(k_, k_t, o)
    if o.only_faded:
        return
    A = tl.where(s < t, keys, 0.0)
    if o.decay:
        sums = decay_sums(decay_logarithms(load_gate(a + gate, rows, left, gate_token, 1.0, o), o))
        fading = reach(scores, sums, sums, False, 1, C)
        scores *= fading
        A *= fading
    else:
        scores = tl.where(s <= t, scores, 0.0)
    P_at = tiles + (o.planes - 1) * C * C + s * C + t
    tl.store(P_at, scores.to(tiles.dtype.element_ty), at_or_above(s, t))
    if o.erase:
        Z = resolvent(A, load_gate(e + gate, rows, left, gate_token, 0.0, o), o)
        tl.store(tiles + s * C + t, Z.to(tiles.dtype.element_ty), at_or_above(s, t))


@triton.jit(do_not_specialize=["G", "given"])
def scan_groups(
    transitions,  # (B G, H, D, D), F of each group
    changes,  # (B G, H, D, M), what each group makes of no state
    start,  # (B, H, D, M)
    states,  # (B G, H, D, M), before each group
    G,
    given,
    BACK: tl.constexpr,
    o: tl.constexpr,
):
    """The states before the groups of a sequence, for one head and some columns.

        state = start                                           # zero where it is not `given`
        for g in range(G):
            states[g] = state
            state = transitions[g] @ state + changes[g]

    With `BACK` from the last group to the first, by the transposed transitions: gradients of the states that groups
    leave.
    """
    PRECISION: tl.constexpr = o.precision
    splits: tl.constexpr = (o.M + o.block_M - 1) // o.block_M
    program = tl.program_id(0)
    head = (program // splits) % o.H
    n = (program // (splits * o.H)).to(tl.int64)
    m = (program % splits) * o.block_M + tl.arange(0, o.block_M)
    d = tl.arange(0, o.block_D)
    # Value-major, as in the walks: the state is the left operand of every product it enters.
    inside = (m[:, None] < o.M) & (d[None, :] < o.D)
    at = d[None, :] * o.M + m[:, None]
    square = (d[:, None] < o.D) & (d[None, :] < o.D)
    turned = d[:, None] * o.D + d[None, :] if BACK else d[None, :] * o.D + d[:, None]
    state = tl.load(start + (n * o.H + head) * o.D * o.M + at, inside & (given != 0), 0.0)
    for i in range(G):
        g = G - 1 - i if BACK else i
        group = (n * G + g) * o.H + head
        tl.store(states + group * o.D * o.M + at, state, inside)
        F_t = tl.load(transitions + group * o.D * o.D + turned, square, 0.0)
        change = tl.load(changes + group * o.D * o.M + at, inside, 0.0)
        state = change + product(state, F_t, state.dtype, PRECISION)
