# mypy: disable-error-code="no-untyped-def"
"""The forward walk token by token: the recurrence as it is written, with the state in registers."""

import triton.language as tl

from fastweights.ops.gpu.memory.kernels.gluon import async_copy, gl, jit
from fastweights.ops.gpu.memory.kernels.recurrent_tiles import column, copy_ahead, row, state_layout
from fastweights.ops.gpu.memory.kernels.tiles import in_entries, sequence


@jit(do_not_specialize=["T", "keep", "given"])
def walk_tokens_forward(
    tokens,  # q and k (B, T, H, D), v (B, T, H, M), and the gates a (None), e, w, each (B, T, H) or None
    remaining,  # none: these walks take no decays
    W,  # (N, H, D, M), the first state
    cu_seqlens,  # (N + 1,) or None
    outputs,  # y (B, T, H, M) and W_end (N, H, D, M)
    saved,  # states before each chunk (slots, H, M, D), nothing, and E (B, T, H, M)
    T,
    keep,
    given,
    strides,  # token and head strides of q, k, v and the gates
    o: tl.constexpr,
):
    """Take one sequence and head through all tokens; with `keep` and `given` as in `walk_forward`.

    for t in range(T):                                      # states transposed, (M, D)
        if t % C == 0:
            states[t // C] = W
        E = v[t] - W @ k[t]                                 # one gate erases and writes; else -W @ k[t]
        U = E * e[t]                                        # else E * e[t] + v[t] * w[t]
        W = W + outer(U, k[t])
        y[t] = W @ q[t]
    """
    C: tl.constexpr = o.C
    BLOCK_D: tl.constexpr = o.block_D
    BLOCK_M: tl.constexpr = o.block_M
    STAGES: tl.constexpr = o.stages
    WARPS: tl.constexpr = o.warps
    ACC: tl.constexpr = o.acc
    q, k, v, _, e, w = tokens
    y, W_end = outputs
    states, _, errors = saved
    q_token, q_head, k_token, k_head, v_token, v_head, gate_token, gate_head = in_entries(strides, o)
    program = tl.program_id(0)
    head = program % o.H
    n = program // o.H
    first, length, slot = sequence(n, T, cu_seqlens, o.C, o)

    # Four in turn, so that states are written in whole sectors; where a lane has but eight that is slower.
    layout: tl.constexpr = state_layout(BLOCK_M, BLOCK_D, o.lanes, WARPS, 4 if BLOCK_D > 16 else BLOCK_D // o.lanes)
    # So many tokens are unrolled: more code of larger heads does not stay in the cache of instructions.
    TILE: tl.constexpr = 16 if BLOCK_D * BLOCK_M <= 512 else 8
    in_rows: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    k_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    v_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_M], in_rows)
    if o.erase:
        e_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)
    if o.write:
        w_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)

    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    in_state = (m[:, None] < o.M) & (d[None, :] < o.D)
    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    v += first * v_token + head * v_head
    gate = first * gate_token + head * gate_head
    y += (first * o.H + head) * o.M + m
    errors += (first * o.H + head) * o.M + m
    states += (slot * o.H + head) * o.D * o.M + m[:, None] * o.D + d[None, :]
    state = (n.to(tl.int64) * o.H + head) * o.D * o.M + d[None, :] * o.M + m[:, None]
    W_t = gl.load(W + state, in_state & (given != 0), 0.0)

    ahead = 0
    for start in range(-(STAGES - 1) * TILE, length, TILE):
        # As many tiles ahead as there are stages, less the one that is read below.
        coming = start + (STAGES - 1) * TILE
        copy_ahead(q_tiles, ahead, q, coming, length, q_token, o.D, WARPS)
        copy_ahead(k_tiles, ahead, k, coming, length, k_token, o.D, WARPS)
        copy_ahead(v_tiles, ahead, v, coming, length, v_token, o.M, WARPS)
        if o.erase:
            copy_ahead(e_tiles, ahead, e + gate, coming, length, gate_token, 1, WARPS)
        if o.write:
            copy_ahead(w_tiles, ahead, w + gate, coming, length, gate_token, 1, WARPS)
        async_copy.commit_group()
        ahead = tl.where(ahead == STAGES - 1, 0, ahead + 1)
        if start >= 0:
            async_copy.wait_group(STAGES - 1)
            # The stage after the one that was begun last was begun first.
            q_ = q_tiles.index(ahead)
            k_ = k_tiles.index(ahead)
            v_ = v_tiles.index(ahead)
            left = length - start
            # A mask, not a branch or a variant: what inference runs is what training checks.
            gl.store(states + start // C * o.H * o.D * o.M, W_t, in_state & (keep != 0) & (start % C == 0))
            for t in tl.static_range(TILE):
                there = (m < o.M) & (t < left)
                k_t = row(k_, t, layout)
                u = column(v_, t, layout)
                if o.write:
                    u *= row(w_tiles.index(ahead), t, layout)
                if o.erase:
                    recall = gl.sum(W_t * k_t, 1)[:, None]
                    error = u - recall if o.tied else recall * -1.0
                    change = error * row(e_tiles.index(ahead), t, layout)
                    u = change if o.tied else u + change
                    gl.store(errors + t * o.H * o.M, gl.sum(error, 1), there & (keep != 0))
                W_t += k_t * u
                gl.store(y + t * o.H * o.M, gl.sum(W_t * row(q_, t, layout), 1), there)
            y += TILE * o.H * o.M
            errors += TILE * o.H * o.M
    async_copy.wait_group(0)
    gl.store(W_end + state, W_t, in_state)
