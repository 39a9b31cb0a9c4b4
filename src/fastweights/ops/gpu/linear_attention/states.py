# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of linear attention for many tokens: keys are written into a memory, which queries read.

With many heads a program has one of them and does everything; what it has written to device memory it reads again
(`attend`, `attend_gradients`). With few heads each step is a launch of its own over tiles of tokens, and memories are
sums of parts.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.linear_attention.heads import of_head
from fastweights.ops.gpu.linear_attention.memories import (
    common,
    key_tile,
    memory_of_gradients,
    memory_of_keys,
    query_tile,
    read_tile,
    store_memory,
)
from fastweights.ops.gpu.memory.kernels.tiles import load_rows


@triton.jit(do_not_specialize=["T", "S"])
def attend(
    q,  # (B, T, H, R)
    k,  # (B, S, H, R)
    v,  # (B, S, H, M)
    mask,  # (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    W,  # (B, H, D, M)
    z,  # (B, H, D)
    c,  # (B, H, M)
    y,  # (B, T, H, M)
    T,
    S,
    strides,  # token and head strides of q, k and v
    o: tl.constexpr,
):
    """Write all keys of one head into its memory, and read it with all queries.

    W, z = phi(k).T @ v, phi(k).sum(0)
    c = common(W, z)                                               # from the first block of features
    y = phi(q) @ (W - outer(z, c)) / (phi(q) @ z) + c              # `normalized`; else phi(q) @ W
    """
    q_token, q_head, k_token, k_head, v_token, v_head = strides
    head = tl.program_id(0).to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o)
    k = of_head(k, head, S, k_token, k_head, o)
    v = of_head(v, head, S, v_token, v_head, o)
    y = of_head(y, head, T, o.H * o.M, o.M, o)
    W += head * o.D * o.M
    z += head * o.D
    c += head * o.M
    m = tl.arange(0, o.block_M)
    centre = tl.full((o.block_M,), 0.0, o.acc)
    for first in range(0, o.D, o.block_D):
        part, sums = memory_of_keys(k, v, mask, vectors, head, first, 0, S, S, k_token, v_token, o)
        if o.normalized:
            centre = tl.where(first == 0, common(part, sums, o), centre)
            part -= sums[:, None] * centre[None, :]
        store_memory(W, z, part, sums, first, o)
    if o.normalized:
        tl.store(c + m, centre, m < o.M)
    # What other threads of this program have written is there to be read after this.
    tl.debug_barrier()
    for start in range(0, T, o.C):
        at = tl.cast(start, tl.int64)
        read_tile(q + at * q_token, W, z, c, vectors, y + at * (o.H * o.M), T - start, q_token, o)


@triton.jit(do_not_specialize=["T", "S"])
def attend_gradients(
    q,  # (B, T, H, R)
    k,  # (B, S, H, R)
    v,  # (B, S, H, M)
    mask,  # (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    W,  # (B, H, D, M), what `attend` wrote
    z,  # (B, H, D)
    c,  # (B, H, M)
    dy,  # (B, T, H, M)
    dq,  # (B, T, H, R)
    dk,  # (B, S, H, R)
    dv,  # (B, S, H, M)
    scale,  # (B, H, T)
    along,  # (B, H, T)
    dW,  # (B, H, D, M)
    dz,  # (B, H, D)
    T,
    S,
    strides,  # token and head strides of q, k, v and dy
    o: tl.constexpr,
):
    """Compute the gradients of one head: `query_tile`, then `memory_of_gradients`, then `key_tile`."""
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head = strides
    head = tl.program_id(0).to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o)
    k = of_head(k, head, S, k_token, k_head, o)
    v = of_head(v, head, S, v_token, v_head, o)
    dy = of_head(dy, head, T, g_token, g_head, o)
    dq = of_head(dq, head, T, o.H * o.R, o.R, o)
    dk = of_head(dk, head, S, o.H * o.R, o.R, o)
    dv = of_head(dv, head, S, o.H * o.M, o.M, o)
    W += head * o.D * o.M
    dW += head * o.D * o.M
    z += head * o.D
    dz += head * o.D
    c += head * o.M
    scale += head * T
    along += head * T
    for start in range(0, T, o.C):
        at = tl.cast(start, tl.int64)
        x, g, dx = q + at * q_token, dy + at * g_token, dq + at * (o.H * o.R)
        query_tile(x, g, W, z, vectors, dx, scale + start, along + start, T - start, q_token, g_token, o)
    tl.debug_barrier()
    for first in range(0, o.D, o.block_D):
        part, sums = memory_of_gradients(q, dy, scale, along, vectors, first, 0, T, q_token, g_token, o)
        store_memory(dW, dz, part, sums, first, o)
    tl.debug_barrier()
    for start in range(0, S, o.C):
        at = tl.cast(start, tl.int64)
        x, values = k + at * k_token, v + at * v_token
        dx, d_values = dk + at * (o.H * o.R), dv + at * (o.H * o.M)
        key_tile(x, values, mask, vectors, head, dW, dz, c, dx, d_values, start, S, k_token, v_token, o)


@triton.jit(do_not_specialize=["S", "heads", "tokens", "parts"])
def write_keys(
    k,  # (B, S, H, R)
    v,  # (B, S, H, M)
    mask,  # (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    W,  # (parts, B, H, D, M)
    z,  # (parts, B, H, D)
    S,
    heads,  # B H
    tokens,  # of a part
    parts,
    strides,  # token and head strides of k and v
    o: tl.constexpr,
):
    """Write some keys of one head into a memory of their own, `block_D` features of it.

    W, z = phi(k).T @ v, phi(k).sum(0)
    """
    k_token, k_head, v_token, v_head = strides
    head, part, first = which_part(parts, o)
    k = of_head(k, head, S, k_token, k_head, o)
    v = of_head(v, head, S, v_token, v_head, o)
    begin = part * tokens
    W_part, z_part = memory_of_keys(
        k, v, mask, vectors, head, first, begin, tl.minimum(begin + tokens, S), S, k_token, v_token, o
    )
    at = part * heads + head
    store_memory(W + at * o.D * o.M, z + at * o.D, W_part, z_part, first, o)


@triton.jit(do_not_specialize=["T", "heads", "tokens", "parts"])
def write_gradients(
    q,  # (B, T, H, R)
    dy,  # (B, T, H, M)
    vectors,  # (m, R), of FAVOR+
    scale,  # (B, H, T)
    along,  # (B, H, T)
    dW,  # (parts, B, H, D, M)
    dz,  # (parts, B, H, D)
    T,
    heads,  # B H
    tokens,  # of a part
    parts,
    strides,  # token and head strides of q and dy
    o: tl.constexpr,
):
    """Write some queries of one head and their gradients into a memory of their own, `block_D` features of it.

    dW, dz = (phi(q) * scale).T @ dy, -(phi(q) * scale).T @ along
    """
    q_token, q_head, g_token, g_head = strides
    head, part, first = which_part(parts, o)
    q = of_head(q, head, T, q_token, q_head, o)
    dy = of_head(dy, head, T, g_token, g_head, o)
    begin = part * tokens
    W_part, z_part = memory_of_gradients(
        q,
        dy,
        scale + head * T,
        along + head * T,
        vectors,
        first,
        begin,
        tl.minimum(begin + tokens, T),
        q_token,
        g_token,
        o,
    )
    at = part * heads + head
    store_memory(dW + at * o.D * o.M, dz + at * o.D, W_part, z_part, first, o)


@triton.jit
def which_part(parts, o: tl.constexpr):
    """The head, the part and the first feature of a program that writes."""
    program = tl.program_id(0)
    BLOCKS: tl.constexpr = (o.D + o.block_D - 1) // o.block_D
    return (program // (parts * BLOCKS)).to(tl.int64), program // BLOCKS % parts, program % BLOCKS * o.block_D


@triton.jit(do_not_specialize=["heads", "parts"])
def join_parts(
    W_parts,  # (parts, B, H, D, M)
    z_parts,  # (parts, B, H, D)
    W,  # (B, H, D, M)
    z,  # (B, H, D)
    c,  # (B, H, M), with `centred`
    heads,  # B H
    parts,
    o: tl.constexpr,
):
    """Add the parts of one head's memory, `block_D` features of it.

    W, z = W_parts.sum(0), z_parts.sum(0)
    c = common(W, z)                                               # with `centred`; from the first block of features
    W = W - outer(z, c)
    """
    BLOCKS: tl.constexpr = (o.D + o.block_D - 1) // o.block_D
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * o.block_D
    m = tl.arange(0, o.block_M)
    total, sums = sum_of_parts(W_parts, z_parts, head, first, heads, parts, o)
    if o.centred:
        if BLOCKS == 1:
            centre = common(total, sums, o)
        else:
            rest, rest_sums = sum_of_parts(W_parts, z_parts, head, 0, heads, parts, o)
            centre = common(rest, rest_sums, o)
        total -= sums[:, None] * centre[None, :]
        if first == 0:
            tl.store(c + head * o.M + m, centre, m < o.M)
    store_memory(W + head * o.D * o.M, z + head * o.D, total, sums, first, o)


@triton.jit
def sum_of_parts(W_parts, z_parts, head, first, heads, parts, o: tl.constexpr):
    """Add `block_D` features from `first` on of the parts of one head's memory."""
    W = tl.full((o.block_D, o.block_M), 0.0, o.acc)
    z = tl.full((o.block_D,), 0.0, o.acc)
    d = first + tl.arange(0, o.block_D)
    for part in range(0, parts):
        at = tl.cast(part, tl.int64) * heads + head
        W += load_rows(W_parts + at * o.D * o.M, d, o.D, tl.arange(0, o.block_M), o.M, o.M)
        if o.normalized:
            z += tl.load(z_parts + at * o.D + d, d < o.D, 0.0)
    return W, z


@triton.jit(do_not_specialize=["T"])
def read(
    q,  # (B, T, H, R)
    vectors,  # (m, R), of FAVOR+
    W,  # (B, H, D, M)
    z,  # (B, H, D)
    c,  # (B, H, M), with `centred`
    y,  # (B, T, H, M)
    T,
    strides,  # token and head strides of q
    o: tl.constexpr,
):
    """Read the memory of one head with C queries.

    y = phi(q) @ W / (phi(q) @ z) + c                              # `normalized`; else phi(q) @ W
    """
    q_token, q_head = strides
    tiles = tl.cdiv(T, o.C)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * o.C
    at = start.to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o) + at * q_token
    y = of_head(y, head, T, o.H * o.M, o.M, o) + at * (o.H * o.M)
    read_tile(q, W + head * o.D * o.M, z + head * o.D, c + head * o.M, vectors, y, T - start, q_token, o)


@triton.jit(do_not_specialize=["T"])
def query_gradients(
    q,  # (B, T, H, R)
    dy,  # (B, T, H, M)
    vectors,  # (m, R), of FAVOR+
    W,  # (B, H, D, M)
    z,  # (B, H, D)
    dq,  # (B, T, H, R)
    scale,  # (B, H, T)
    along,  # (B, H, T)
    T,
    strides,  # token and head strides of q and dy
    o: tl.constexpr,
):
    """Compute `query_tile` of C queries of one head."""
    q_token, q_head, g_token, g_head = strides
    tiles = tl.cdiv(T, o.C)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * o.C
    at = start.to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o) + at * q_token
    dy = of_head(dy, head, T, g_token, g_head, o) + at * g_token
    dq = of_head(dq, head, T, o.H * o.R, o.R, o) + at * (o.H * o.R)
    scale += head * T + start
    along += head * T + start
    query_tile(q, dy, W + head * o.D * o.M, z + head * o.D, vectors, dq, scale, along, T - start, q_token, g_token, o)


@triton.jit(do_not_specialize=["S"])
def key_gradients(
    k,  # (B, S, H, R)
    v,  # (B, S, H, M)
    mask,  # (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    dW,  # (B, H, D, M)
    dz,  # (B, H, D)
    c,  # (B, H, M)
    dk,  # (B, S, H, R)
    dv,  # (B, S, H, M)
    S,
    strides,  # token and head strides of k and v
    o: tl.constexpr,
):
    """Compute `key_tile` of C keys of one head."""
    k_token, k_head, v_token, v_head = strides
    tiles = tl.cdiv(S, o.C)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * o.C
    at = start.to(tl.int64)
    k = of_head(k, head, S, k_token, k_head, o) + at * k_token
    v = of_head(v, head, S, v_token, v_head, o) + at * v_token
    dk = of_head(dk, head, S, o.H * o.R, o.R, o) + at * (o.H * o.R)
    dv = of_head(dv, head, S, o.H * o.M, o.M, o) + at * (o.H * o.M)
    W = dW + head * o.D * o.M
    key_tile(k, v, mask, vectors, head, W, dz + head * o.D, c + head * o.M, dk, dv, start, S, k_token, v_token, o)
