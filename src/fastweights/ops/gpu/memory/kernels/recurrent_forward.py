# mypy: disable-error-code="no-untyped-def"
"""The forward walk token by token: the recurrence as it is written, with the state in registers."""

import triton.language as tl

from fastweights.ops.gpu.memory.kernels.gluon import async_copy, gl, jit
from fastweights.ops.gpu.memory.kernels.recurrent_tiles import column, copy_ahead, row, state_layout
from fastweights.ops.gpu.memory.kernels.tiles import sequence


@jit(do_not_specialize=["T", "keep", "given"])
def walk_tokens_forward(
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
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    TIED: tl.constexpr,
    PACKED: tl.constexpr,
    LANES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    q_token *= UNIT
    q_head *= UNIT
    k_token *= UNIT
    k_head *= UNIT
    v_token *= UNIT
    v_head *= UNIT
    program = tl.program_id(0)
    head = program % H
    n = program // H
    first, length, slot = sequence(n, T, cu_seqlens, C, PACKED)

    # Four in turn, so that states are written in whole sectors; where a lane has but eight that is slower.
    layout: tl.constexpr = state_layout(BLOCK_M, BLOCK_D, LANES, WARPS, 4 if BLOCK_D > 16 else BLOCK_D // LANES)
    # So many tokens are unrolled: more code of larger heads does not stay in the cache of instructions.
    TILE: tl.constexpr = 16 if BLOCK_D * BLOCK_M <= 512 else 8
    in_rows: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ACC: tl.constexpr = W_end.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    k_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    v_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_M], in_rows)
    if ERASE:
        e_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)
    if WRITE:
        w_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)

    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    in_state = (m[:, None] < M) & (d[None, :] < D)
    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    v += first * v_token + head * v_head
    gate = first * gate_token + head * gate_head
    y += (first * H + head) * M + m
    errors += (first * H + head) * M + m
    states += (slot * H + head) * D * M + m[:, None] * D + d[None, :]
    state = (n.to(tl.int64) * H + head) * D * M + d[None, :] * M + m[:, None]
    W_t = gl.load(W + state, in_state & (given != 0), 0.0)

    ahead = 0
    for start in range(-(STAGES - 1) * TILE, length, TILE):
        # As many tiles ahead as there are stages, less the one that is read below.
        coming = start + (STAGES - 1) * TILE
        copy_ahead(q_tiles, ahead, q, coming, length, q_token, D, WARPS)
        copy_ahead(k_tiles, ahead, k, coming, length, k_token, D, WARPS)
        copy_ahead(v_tiles, ahead, v, coming, length, v_token, M, WARPS)
        if ERASE:
            copy_ahead(e_tiles, ahead, e + gate, coming, length, gate_token, 1, WARPS)
        if WRITE:
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
            gl.store(states + start // C * H * D * M, W_t, in_state & (keep != 0) & (start % C == 0))
            for t in tl.static_range(TILE):
                there = (m < M) & (t < left)
                k_t = row(k_, t, layout)
                u = column(v_, t, layout)
                if WRITE:
                    u *= row(w_tiles.index(ahead), t, layout)
                if ERASE:
                    recall = gl.sum(W_t * k_t, 1)[:, None]
                    error = u - recall if TIED else recall * -1.0
                    change = error * row(e_tiles.index(ahead), t, layout)
                    u = change if TIED else u + change
                    gl.store(errors + t * H * M, gl.sum(error, 1), there & (keep != 0))
                W_t += k_t * u
                gl.store(y + t * H * M, gl.sum(W_t * row(q_, t, layout), 1), there)
            y += TILE * H * M
            errors += TILE * H * M
    async_copy.wait_group(0)
    gl.store(W_end + state, W_t, in_state)
