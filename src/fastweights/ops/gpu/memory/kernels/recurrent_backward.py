# mypy: disable-error-code="no-untyped-def"
"""The walk back token by token, two at once; gradients that are no recurrence by products over a chunk.

Those are the gradients of queries, keys and gates, formed as in `gradients`.
"""

import triton.language as tl

from fastweights.ops.gpu.memory.kernels.gluon import async_copy, constexpr_function, gl, jit, mma_v2, two_sums
from fastweights.ops.gpu.memory.kernels.recurrent_tiles import column, copy_ahead, row, state_layout, tile_layout
from fastweights.ops.gpu.memory.kernels.tiles import in_entries, leading_digits, sequence


@constexpr_function
def skewed_rows(WIDTH):
    """Rows of a tile in shared memory, turned by four entries from row to row: columns are read at once, too."""
    return gl.SwizzledSharedLayout(4, max(32 // WIDTH, 1), min(WIDTH // 4, 8), [1, 0])


@constexpr_function
def sum_layout(ROWS, WIDTH, WARPS):
    """Rows of a tile that are summed up, some lanes a row."""
    return gl.BlockedLayout([1, WIDTH * ROWS // 32], [ROWS, 32 // ROWS], [WARPS, 1], [1, 0])


@jit
def in_eights(tiles):
    """Tiles (stages, C, ·) as (·, 8, ·)."""
    shape: tl.constexpr = [tiles.shape[0] * tiles.shape[1] // 8, 8, tiles.shape[2]]
    return tiles._reinterpret(tiles.dtype, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@jit
def every_other(tile, which: tl.constexpr, WARPS: tl.constexpr):
    """The first, or the second, of every two tokens of a tile."""
    WIDTH: tl.constexpr = tile.shape[1]
    PAIRS: tl.constexpr = tile.shape[0] // 2
    layout: tl.constexpr = sum_layout(PAIRS, WIDTH, WARPS)
    return tile.reshape([PAIRS, 2 * WIDTH]).slice(which * WIDTH, WIDTH, 1).load(layout)


@jit
def side_by_side(one, two, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Two columns (M, 1) that every lane of a row has, as (M, 2): half of the lanes for each."""
    M: tl.constexpr = one.shape[0]
    layout: tl.constexpr = state_layout(M, LANES, LANES, WARPS, 1)
    two = gl.convert_layout(two, layout)
    return gl.where(gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :] == 0, gl.convert_layout(one, layout), two)


@jit
def product(x, y, total, small, PRECISION: tl.constexpr):
    """total + x @ y, as in `tiles.product`; what the leading digits leave is added to `small`, beside the rest."""
    if PRECISION == "tf32x3":
        rough_x = leading_digits(x)
        rough_y = leading_digits(y)
        total = mma_v2(rough_x, rough_y, total, "tf32")
        small = mma_v2(x - rough_x, rough_y, small, "tf32")
        small = mma_v2(rough_x, y - rough_y, small, "tf32")
    else:
        total = mma_v2(x, y, total, PRECISION)
    return total, small


@jit
def two_back(dW_t, q, k, dy, e, keys, own, t: tl.constexpr, layout: tl.constexpr, o: tl.constexpr):
    """The gradient of the state before tokens t and t + 1, and their dR as (M, 2).

    dW = dW + outer(dy[t + 1], q[t + 1])
    dR_2 = dW @ k[t + 1]
    dR_1 = dW @ k[t] + own[t] * dy[t] - keys[t] * e[t + 1] * dR_2  # own = k[t] @ q[t], keys = k[t] @ k[t + 1]
    dW = dW + outer(dy[t], q[t]) - outer(e[t + 1] * dR_2, k[t + 1]) - outer(e[t] * dR_1, k[t])
    """
    # Both sums before the second token takes anything away, or the first adds: they know those parts.
    k_1 = row(k, t, layout)
    k_2 = row(k, t + 1, layout)
    dy_1 = column(dy, t, layout)
    dW_t += row(q, t + 1, layout) * column(dy, t + 1, layout)
    du_1, du_2 = two_sums(dW_t * k_1, dW_t * k_2)
    dW_t += row(q, t, layout) * dy_1
    du_1 += row(own, t // 2, layout) * dy_1
    if o.erase:
        drest_2 = du_2 * row(e, t + 1, layout)
        du_1 -= row(keys, t // 2, layout) * drest_2
        dW_t -= k_2 * drest_2
        dW_t -= k_1 * (du_1 * row(e, t, layout))
    return dW_t, side_by_side(du_1, du_2, o.lanes, o.warps)


@jit
def eight_back(dW_t, q, k, dy, e, keys, own, layout: tl.constexpr, o: tl.constexpr):
    """The gradient of the state before eight tokens, and their dR as (M, 8)."""
    dW_t, last = two_back(dW_t, q, k, dy, e, keys, own, 6, layout, o)
    dW_t, third = two_back(dW_t, q, k, dy, e, keys, own, 4, layout, o)
    dW_t, second = two_back(dW_t, q, k, dy, e, keys, own, 2, layout, o)
    dW_t, first = two_back(dW_t, q, k, dy, e, keys, own, 0, layout, o)
    halves = gl.join(gl.join(first, second), gl.join(third, last))
    return dW_t, gl.reshape(gl.permute(halves, (0, 3, 2, 1)), [dy.shape[1], 8])


@jit(do_not_specialize=["T", "final", "wanted"])
def walk_tokens_backward(
    tokens,  # q and k (B, T, H, D), v (B, T, H, M), and the gates a (None), e, w, each (B, T, H) or None
    remaining,  # none: these walks take no decays
    cu_seqlens,  # (N + 1,) or None
    saved,  # as `walk_tokens_forward` takes it
    dy,  # (B, T, H, M)
    dW_end,  # (N, H, D, M)
    gradients,  # dq and dk (B, T, H, D), dv (B, T, H, M), and da (None), de, dw, each (B, T, H) or None
    dW,  # (N, H, D, M), of the first state
    dstates,  # none
    dright,  # none
    T,
    final,
    wanted,
    strides,  # token and head strides of q, k, v, dy and the gates
    o: tl.constexpr,
):
    """Take the gradient of one head's state back through a sequence; `final` and `wanted` as in `walk_backward`.

    for chunk in reversed(range(chunks)):                   # states transposed, (M, D)
        after = dW
        for t in reversed(chunk):                           # two at a time: `two_back`
            dW = dW + outer(dy[t], q[t])
            dR[t] = dW @ k[t]
            dW = dW - outer(e[t] * dR[t], k[t])
        dscores = (U @ dy.T).triu()                         # U = E * e, or E * e + v * w
        dkeys = (U @ (e * dR).T).triu(1)
        dq = dy @ W + dscores.T @ k                         # W before the chunk
        dk = U @ after + dscores @ q - (e * dR) @ W - (dkeys + dkeys.T) @ k
        dv, de, dw = dR * w, (dR * E).sum(1), (dR * v).sum(1)
    """
    C: tl.constexpr = o.C
    BLOCK_D: tl.constexpr = o.block_D
    BLOCK_M: tl.constexpr = o.block_M
    STAGES: tl.constexpr = o.stages
    WARPS: tl.constexpr = o.warps
    ACC: tl.constexpr = o.acc
    PRECISION: tl.constexpr = o.precision
    q, k, v, _, e, w = tokens
    states, _, errors = saved
    dq, dk, dv, _, de, dw = gradients
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, gate_token, gate_head = in_entries(strides, o)
    program = tl.program_id(0)
    head = program % o.H
    n = program // o.H
    first, length, slot = sequence(n, T, cu_seqlens, o.C, o)

    layout: tl.constexpr = state_layout(BLOCK_M, BLOCK_D, o.lanes, WARPS, BLOCK_D // o.lanes)
    in_rows: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_tiles = gl.allocate_shared_memory(ACC, [STAGES, C, BLOCK_D], in_rows)
    k_tiles = gl.allocate_shared_memory(ACC, [STAGES, C, BLOCK_D], in_rows)
    dy_tiles = gl.allocate_shared_memory(ACC, [STAGES, C, BLOCK_M], in_rows)
    W_tiles = gl.allocate_shared_memory(ACC, [STAGES, BLOCK_M, BLOCK_D], skewed_rows(BLOCK_D))
    if o.erase:
        error_tiles = gl.allocate_shared_memory(ACC, [STAGES, C, BLOCK_M], in_rows)
        e_tiles = gl.allocate_shared_memory(ACC, [STAGES, C, 1], in_rows)
    if not o.tied:
        v_tiles = gl.allocate_shared_memory(ACC, [STAGES, C, BLOCK_M], in_rows)
    if o.write:
        w_tiles = gl.allocate_shared_memory(ACC, [STAGES, C, 1], in_rows)
    # What two tokens that are taken at once have in common, and what the walk leaves.
    keys = gl.allocate_shared_memory(ACC, [C // 8, 4, 1], in_rows)
    own = gl.allocate_shared_memory(ACC, [C // 8, 4, 1], in_rows)
    du_tiles = gl.allocate_shared_memory(ACC, [C // 8, 8, BLOCK_M], in_rows)
    # Operands of products; a single token cannot be read where rows are turned.
    by_features: tl.constexpr = skewed_rows(BLOCK_D)
    by_values: tl.constexpr = skewed_rows(BLOCK_M)
    q_tile = gl.allocate_shared_memory(ACC, [C, BLOCK_D], by_features)
    k_tile = gl.allocate_shared_memory(ACC, [C, BLOCK_D], by_features)
    dW_tile = gl.allocate_shared_memory(ACC, [BLOCK_M, BLOCK_D], by_features)
    dy_tile = gl.allocate_shared_memory(ACC, [C, BLOCK_M], by_values)
    u_tile = gl.allocate_shared_memory(ACC, [C, BLOCK_M], by_values)
    drest_tile = gl.allocate_shared_memory(ACC, [C, BLOCK_M], by_values)
    dscores_tile = gl.allocate_shared_memory(ACC, [C, C], skewed_rows(C))
    dkeys_tile = gl.allocate_shared_memory(ACC, [C, C], skewed_rows(C))

    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    in_state = (m[:, None] < o.M) & (d[None, :] < o.D)
    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    v += first * v_token + head * v_head
    dy += first * dy_token + head * dy_head
    gate = first * gate_token + head * gate_head
    states += (slot * o.H + head) * o.D * o.M
    state = (n.to(tl.int64) * o.H + head) * o.D * o.M + d[None, :] * o.M + m[:, None]
    dW_t = gl.load(dW_end + state, in_state & (final != 0), 0.0)

    # Sums of products, operands of products, and rows as values are stored.
    summed: tl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    left_of: tl.constexpr = gl.DotOperandLayout(0, summed, 1)
    right_of: tl.constexpr = gl.DotOperandLayout(1, summed, 1)
    rows: tl.constexpr = tile_layout(BLOCK_M, WARPS)
    s = gl.arange(0, C, gl.SliceLayout(1, summed))[:, None]
    t = gl.arange(0, C, gl.SliceLayout(0, summed))[None, :]
    feature = gl.arange(0, BLOCK_D, gl.SliceLayout(0, summed))[None, :]
    value = gl.arange(0, BLOCK_M, gl.SliceLayout(0, rows))[None, :]
    token = gl.arange(0, C, gl.SliceLayout(1, rows))

    last = tl.cdiv(length, C) - 1
    ahead = 0
    for i in range(-(STAGES - 1), last + 1):
        coming = (last - i - (STAGES - 1)) * C
        copy_ahead(q_tiles, ahead, q, coming, length, q_token, o.D, WARPS)
        copy_ahead(k_tiles, ahead, k, coming, length, k_token, o.D, WARPS)
        copy_ahead(dy_tiles, ahead, dy, coming, length, dy_token, o.M, WARPS)
        before = states + tl.maximum(coming, 0) // C * o.H * o.D * o.M
        copy_ahead(W_tiles, ahead, before, 0, tl.where(coming >= 0, o.M, 0), o.D, o.D, WARPS)
        if o.erase:
            copy_ahead(error_tiles, ahead, errors + (first * o.H + head) * o.M, coming, length, o.H * o.M, o.M, WARPS)
            copy_ahead(e_tiles, ahead, e + gate, coming, length, gate_token, 1, WARPS)
        if not o.tied:
            copy_ahead(v_tiles, ahead, v, coming, length, v_token, o.M, WARPS)
        if o.write:
            copy_ahead(w_tiles, ahead, w + gate, coming, length, gate_token, 1, WARPS)
        async_copy.commit_group()
        ahead = tl.where(ahead == STAGES - 1, 0, ahead + 1)
        if i >= 0:
            async_copy.wait_group(STAGES - 1)
            start = (last - i) * C
            left = length - start
            out = (first + start) * o.H + head
            q_ = q_tiles.index(ahead)
            k_ = k_tiles.index(ahead)
            dy_ = dy_tiles.index(ahead)
            dW_tile.store(dW_t)
            k_1 = every_other(k_, 0, WARPS)
            between, with_itself = two_sums(k_1 * every_other(k_, 1, WARPS), k_1 * every_other(q_, 0, WARPS))
            keys._reinterpret(ACC, [C // 2, 1], in_rows).store(between)
            own._reinterpret(ACC, [C // 2, 1], in_rows).store(with_itself)
            e_ = e_tiles.index(ahead) if o.erase else keys
            for back in range(0, C // 8):
                # Not all at once: so much code would not stay in the cache of instructions.
                part = C // 8 - 1 - back
                eight = ahead * (C // 8) + part
                dW_t, found = eight_back(
                    dW_t,
                    in_eights(q_tiles).index(eight),
                    in_eights(k_tiles).index(eight),
                    in_eights(dy_tiles).index(eight),
                    in_eights(e_tiles).index(eight) if o.erase else e_,
                    keys.index(part),
                    own.index(part),
                    layout,
                    o,
                )
                du_tiles.index(part).permute([1, 0]).store(found)

            # All loads, then all stores: between them each would be waited for on its own.
            q_rows = q_.load(tile_layout(BLOCK_D, WARPS))
            k_rows = k_.load(tile_layout(BLOCK_D, WARPS))
            dy_rows = dy_.load(rows)
            du = du_tiles._reinterpret(ACC, [C, BLOCK_M], in_rows).load(rows)
            u = du
            drest = du
            dv_ = du
            if not o.tied:
                u = v_tiles.index(ahead).load(rows)
            if o.write:
                w_ = w_tiles.index(ahead).load(rows)
                gl.store(dw + out + token * o.H, gl.sum(du * u, 1), token < left)
                u *= w_
                dv_ = du * w_
            if o.erase:
                e_rows = e_.load(rows)
                error = error_tiles.index(ahead).load(rows)
                gl.store(de + out + token * o.H, gl.sum(du * error, 1), token < left)
                drest = du * e_rows
                u = error * e_rows if o.tied else u + error * e_rows
                drest_tile.store(drest)
            u_tile.store(u)
            q_tile.store(q_rows)
            k_tile.store(k_rows)
            dy_tile.store(dy_rows)
            in_place = dv + out * o.M + token[:, None] * o.H * o.M + value
            gl.store(in_place, drest if o.tied else dv_, (token[:, None] < left) & (value < o.M))

            # Products that wait for none of each other are summed apart.
            u_left = u_tile.load(left_of)
            few = gl.zeros([C, C], ACC, summed)
            dscores, rest = product(u_left, dy_tile.permute([1, 0]).load(right_of), few, few, PRECISION)
            dscores_tile.store(gl.where(s <= t, dscores + rest, 0.0))
            if o.erase:
                dkeys, rest = product(u_left, drest_tile.permute([1, 0]).load(right_of), few, few, PRECISION)
                # Strictly below the diagonal of A.
                dkeys_tile.store(gl.where(s < t, dkeys + rest, 0.0))
            many = gl.zeros([C, BLOCK_D], ACC, summed)
            W_right = W_tiles.index(ahead).load(right_of)
            k_right = k_tile.load(right_of)
            dq_, dq_rest = product(dy_tile.load(left_of), W_right, many, many, PRECISION)
            dk_, dk_rest = product(u_left, dW_tile.load(right_of), many, many, PRECISION)
            if o.erase:
                less, less_rest = product(drest_tile.load(left_of), W_right, many, many, PRECISION)
            dq_, dq_rest = product(dscores_tile.permute([1, 0]).load(left_of), k_right, dq_, dq_rest, PRECISION)
            dk_, dk_rest = product(dscores_tile.load(left_of), q_tile.load(right_of), dk_, dk_rest, PRECISION)
            dq_ += dq_rest
            dk_ += dk_rest
            if o.erase:
                # It and its transpose are multiplied by the same.
                both = dkeys_tile.load(left_of) + dkeys_tile.permute([1, 0]).load(left_of)
                less, less_rest = product(both, k_right, less, less_rest, PRECISION)
                dk_ -= less + less_rest
            at = out * o.D + s * o.H * o.D + feature
            there = (s < left) & (feature < o.D)
            gl.store(dq + at, dq_, there)
            gl.store(dk + at, dk_, there)
    async_copy.wait_group(0)
    gl.store(dW + state, dW_t, in_state & (wanted != 0))
