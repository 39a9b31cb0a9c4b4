# mypy: disable-error-code="no-untyped-def"
"""The walks token by token: the recurrence as it is written, with the state in registers and no products of tiles.

For float32, where a tensor-core product takes three instructions for one: up to 32 x 32 a walk by chunks has more
instructions, and waits longer for each, than the recurrence itself. They are written in Gluon, the part of Triton in
which layouts are chosen by hand: a thread holds some columns of the state (`columns of values`, rows here, since states
are value-major), or a share of one that `LANES` neighbours sum up. Tokens are copied ahead into shared memory.

Arguments are those of the walks by chunks, so that they are launched alike; some are not used. `chunk_gradients` does
the rest of the gradients from the same states, gradients of states, errors and dR.
"""

import triton.language as tl

from fastweights.ops.backends.triton.gluon import async_copy, constexpr_function, four_sums, gl, jit, two_sums
from fastweights.ops.backends.triton.pieces import sequence


@constexpr_function
def state_layout(BLOCK_M, BLOCK_D, LANES, WARPS):
    """A state (M, D): warps split its rows, every `LANES` lanes hold some of them, each a stretch."""
    threads = 32 * WARPS // LANES
    return gl.BlockedLayout([BLOCK_M // threads, BLOCK_D // LANES], [32 // LANES, LANES], [WARPS, 1], [1, 0])


@constexpr_function
def tile_layout(WIDTH, WARPS):
    """Rows of a tile, four entries a lane."""
    entries = min(4, WIDTH)
    return gl.BlockedLayout([1, entries], [32 * entries // WIDTH, WIDTH // entries], [WARPS, 1], [1, 0])


@constexpr_function
def sum_layout(ROWS, WIDTH, WARPS):
    """Rows of a tile that are summed up, some lanes a row."""
    return gl.BlockedLayout([1, max(WIDTH * ROWS // 32, 1)], [ROWS, 32 // ROWS], [WARPS, 1], [1, 0])


@jit
def copy_ahead(tiles, stage, x, start, length, stride, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """Begin to copy rows of a (tokens, WIDTH) matrix; zeros before the first and past the last, and past WIDTH."""
    tile = tiles.index(stage)
    C: tl.constexpr = tiles.shape[1]
    BLOCK: tl.constexpr = tiles.shape[2]
    layout: tl.constexpr = tile_layout(BLOCK, WARPS)
    rows = start + gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    there = (rows >= 0) & (rows < length) & (columns < WIDTH)
    async_copy.async_copy_global_to_shared(tile, x + rows * stride + columns, there)


@jit
def every_other(tile, which: tl.constexpr, WARPS: tl.constexpr):
    """The first, or the second, of every two tokens of a tile."""
    WIDTH: tl.constexpr = tile.shape[1]
    PAIRS: tl.constexpr = tile.shape[0] // 2
    layout: tl.constexpr = sum_layout(PAIRS, WIDTH, WARPS)
    return tile.reshape([PAIRS, 2 * WIDTH]).slice(which * WIDTH, WIDTH, 1).load(layout)


@jit
def row(tile, t: tl.constexpr, layout: tl.constexpr):
    """One token of a tile (C, ·) as (1, ·)."""
    return tile.slice(t, 1, 0).load(layout)


@jit
def column(tile, t: tl.constexpr, layout: tl.constexpr):
    """One token of a tile (C, ·) as (·, 1)."""
    return tile.slice(t, 1, 0).permute([1, 0]).load(layout)


@jit
def written(u, recall, erase, TIED: tl.constexpr):
    """The error of a token, and what is written under its key, where `u` is the value times the write gate."""
    error = u - recall if TIED else recall * -1.0
    change = error * erase
    return error, change if TIED else u + change


@jit
def side_by_side(one, two, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Two columns (M, 1) that every lane of a row has, as (M, 2): half of the lanes for each."""
    M: tl.constexpr = one.shape[0]
    layout: tl.constexpr = state_layout(M, LANES, LANES, WARPS)
    two = gl.convert_layout(two, layout)
    return gl.where(gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :] == 0, gl.convert_layout(one, layout), two)


@jit
def store_tokens(x, one, two, left, stride, M: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Values (M, 1) of two tokens to their places, as far as `left` goes."""
    BLOCK: tl.constexpr = one.shape[0]
    layout: tl.constexpr = state_layout(BLOCK, LANES, LANES, WARPS)
    m = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))[:, None]
    t = gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :]
    gl.store(x + t * stride + m, side_by_side(one, two, LANES, WARPS), (m < M) & (t < left))


@jit
def store_sums(x, one, two, left, stride, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Sums over values (M, 1) of two tokens to their places."""
    BLOCK: tl.constexpr = one.shape[0]
    layout: tl.constexpr = state_layout(BLOCK, LANES, LANES, WARPS)
    t = gl.arange(0, 2, gl.SliceLayout(0, layout))
    gl.store(x + t * stride, gl.sum(side_by_side(one, two, LANES, WARPS), 0), t < left)


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
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    TIED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
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

    layout: tl.constexpr = state_layout(BLOCK_M, BLOCK_D, LANES, WARPS)
    in_rows: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ACC: tl.constexpr = W_end.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    k_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    v_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_M], in_rows)
    # What two tokens that are taken at once have in common.
    products = gl.allocate_shared_memory(ACC, [4, TILE // 2, 1], in_rows)
    if DECAY:
        a_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)
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
    y += (first * H + head) * M
    errors += (first * H + head) * M
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
        if DECAY:
            copy_ahead(a_tiles, ahead, a + gate, coming, length, gate_token, 1, WARPS)
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
            a_ = a_tiles.index(ahead) if DECAY else v_
            e_ = e_tiles.index(ahead) if ERASE else v_
            w_ = w_tiles.index(ahead) if WRITE else v_
            left = length - start
            # A mask, not a branch or a variant: what inference runs is what training checks.
            gl.store(states + start // C * H * D * M, W_t, in_state & (keep != 0) & (start % C == 0))
            k_1 = every_other(k_, 0, WARPS)
            k_2 = every_other(k_, 1, WARPS)
            q_1 = every_other(q_, 0, WARPS)
            q_2 = every_other(q_, 1, WARPS)
            keys, own_1, cross, own_2 = four_sums(k_1 * k_2, k_1 * q_1, k_1 * q_2, k_2 * q_2)
            products.index(0).store(keys)
            products.index(1).store(own_1)
            products.index(2).store(cross)
            products.index(3).store(own_2)
            for t in tl.static_range(0, TILE, 2):
                # All that two tokens recall and read of the state before them; of each other by the products above.
                k_1 = row(k_, t, layout)
                k_2 = row(k_, t + 1, layout)
                q_1 = row(q_, t, layout)
                q_2 = row(q_, t + 1, layout)
                u_1 = column(v_, t, layout)
                u_2 = column(v_, t + 1, layout)
                if WRITE:
                    u_1 *= row(w_, t, layout)
                    u_2 *= row(w_, t + 1, layout)
                if DECAY:
                    W_t *= gl.where(t < left, row(a_, t, layout), 1.0)
                    a_2 = gl.where(t + 1 < left, row(a_, t + 1, layout), 1.0)
                if ERASE:
                    recall_1, recall_2, y_1, y_2 = four_sums(W_t * k_1, W_t * k_2, W_t * q_1, W_t * q_2)
                    error_1, u_1 = written(u_1, recall_1, row(e_, t, layout), TIED)
                    recall_2 += row(products.index(0), t // 2, layout) * u_1
                    if DECAY:
                        recall_2 *= a_2
                    error_2, u_2 = written(u_2, recall_2, row(e_, t + 1, layout), TIED)
                    kept = tl.where(keep != 0, left - t, 0)
                    store_tokens(errors + t * H * M, error_1, error_2, kept, H * M, M, LANES, WARPS)
                else:
                    y_1, y_2 = two_sums(W_t * q_1, W_t * q_2)
                y_1 += row(products.index(1), t // 2, layout) * u_1
                y_2 += row(products.index(2), t // 2, layout) * u_1
                if DECAY:
                    y_2 *= a_2
                y_2 += row(products.index(3), t // 2, layout) * u_2
                store_tokens(y + t * H * M, y_1, y_2, left - t, H * M, M, LANES, WARPS)
                W_t += k_1 * u_1
                if DECAY:
                    W_t *= a_2
                W_t += k_2 * u_2
            y += TILE * H * M
            errors += TILE * H * M
    async_copy.wait_group(0)
    gl.store(W_end + state, W_t, in_state)


@jit(do_not_specialize=["T", "final", "wanted"])
def walk_tokens_backward(
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
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    TIED: tl.constexpr,
    PACKED: tl.constexpr,
    RIGHT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    q_token *= UNIT
    q_head *= UNIT
    k_token *= UNIT
    k_head *= UNIT
    dy_token *= UNIT
    dy_head *= UNIT
    program = tl.program_id(0)
    head = program % H
    n = program // H
    first, length, slot = sequence(n, T, cu_seqlens, C, PACKED)

    layout: tl.constexpr = state_layout(BLOCK_M, BLOCK_D, LANES, WARPS)
    in_rows: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ACC: tl.constexpr = dW.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    k_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_D], in_rows)
    dy_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_M], in_rows)
    # What two tokens that are taken at once have in common.
    products = gl.allocate_shared_memory(ACC, [2, TILE // 2, 1], in_rows)
    if TIED:
        error_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, BLOCK_M], in_rows)
    if DECAY:
        a_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)
    if ERASE:
        e_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)
    if WRITE:
        w_tiles = gl.allocate_shared_memory(ACC, [STAGES, TILE, 1], in_rows)

    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    in_state = (m[:, None] < M) & (d[None, :] < D)
    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    dy += first * dy_token + head * dy_head
    gate = first * gate_token + head * gate_head
    errors += (first * H + head) * M
    state = (n.to(tl.int64) * H + head) * D * M + d[None, :] * M + m[:, None]
    dW_t = gl.load(dW_end + state, in_state & (final != 0), 0.0)

    last = tl.cdiv(length, TILE) - 1
    dstates += (slot * H + head) * D * M + m[:, None] * D + d[None, :]
    out = (first + last * TILE) * H + head
    dv += out * M
    dright += out * M
    if TIED:
        de += out
    ahead = 0
    for i in range(-(STAGES - 1), last + 1):
        coming = (last - i - (STAGES - 1)) * TILE
        copy_ahead(q_tiles, ahead, q, coming, length, q_token, D, WARPS)
        copy_ahead(k_tiles, ahead, k, coming, length, k_token, D, WARPS)
        copy_ahead(dy_tiles, ahead, dy, coming, length, dy_token, M, WARPS)
        if TIED:
            copy_ahead(error_tiles, ahead, errors, coming, length, H * M, M, WARPS)
        if DECAY:
            copy_ahead(a_tiles, ahead, a + gate, coming, length, gate_token, 1, WARPS)
        if ERASE:
            copy_ahead(e_tiles, ahead, e + gate, coming, length, gate_token, 1, WARPS)
        if WRITE:
            copy_ahead(w_tiles, ahead, w + gate, coming, length, gate_token, 1, WARPS)
        async_copy.commit_group()
        ahead = tl.where(ahead == STAGES - 1, 0, ahead + 1)
        if i >= 0:
            async_copy.wait_group(STAGES - 1)
            start = (last - i) * TILE
            left = length - start
            q_ = q_tiles.index(ahead)
            k_ = k_tiles.index(ahead)
            dy_ = dy_tiles.index(ahead)
            a_ = a_tiles.index(ahead) if DECAY else k_
            e_ = e_tiles.index(ahead) if ERASE else k_
            ends = (left <= TILE) | (start % C == C - TILE)
            gl.store(dstates + start // C * H * D * M, dW_t, in_state & ends)
            k_1 = every_other(k_, 0, WARPS)
            keys, own = two_sums(k_1 * every_other(k_, 1, WARPS), k_1 * every_other(q_, 0, WARPS))
            products.index(0).store(keys)
            products.index(1).store(own)
            for t in tl.static_range(TILE - 2, -1, -2):
                # Both sums before the second token takes anything away, or the first adds: they know those parts.
                k_1 = row(k_, t, layout)
                k_2 = row(k_, t + 1, layout)
                dy_1 = column(dy_, t, layout)
                dW_t += row(q_, t + 1, layout) * column(dy_, t + 1, layout)
                du_1, du_2 = two_sums(dW_t * k_1, dW_t * k_2)
                if DECAY:
                    a_2 = gl.where(t + 1 < left, row(a_, t + 1, layout), 1.0)
                    dW_t *= a_2
                    du_1 *= a_2
                dW_t += row(q_, t, layout) * dy_1
                du_1 += row(products.index(1), t // 2, layout) * dy_1
                drest_1 = du_1
                drest_2 = du_2
                if ERASE:
                    drest_2 *= row(e_, t + 1, layout)
                    erased = drest_2 * a_2 if DECAY else drest_2
                    du_1 -= row(products.index(0), t // 2, layout) * erased
                    drest_1 = du_1 * row(e_, t, layout)
                    dW_t -= k_2 * erased
                    dW_t -= k_1 * drest_1
                if DECAY:
                    dW_t *= gl.where(t < left, row(a_, t, layout), 1.0)
                if TIED:
                    store_tokens(dv + t * H * M, drest_1, drest_2, left - t, H * M, M, LANES, WARPS)
                    error_ = error_tiles.index(ahead)
                    share_1 = du_1 * column(error_, t, layout)
                    share_2 = du_2 * column(error_, t + 1, layout)
                    store_sums(de + t * H, share_1, share_2, left - t, H, LANES, WARPS)
                else:
                    if RIGHT:
                        store_tokens(dright + t * H * M, du_1, du_2, left - t, H * M, M, LANES, WARPS)
                    if WRITE:
                        w_ = w_tiles.index(ahead)
                        du_1 *= row(w_, t, layout)
                        du_2 *= row(w_, t + 1, layout)
                    store_tokens(dv + t * H * M, du_1, du_2, left - t, H * M, M, LANES, WARPS)
            dv -= TILE * H * M
            dright -= TILE * H * M
            if TIED:
                de -= TILE * H
    async_copy.wait_group(0)
    gl.store(dW + state, dW_t, in_state & (wanted != 0))
