# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of linear attention for many tokens: keys are written into a memory, which queries read.

With many heads a program has one of them and does everything; what it has written to device memory it reads again
(`attend`, `attend_gradients`). With few heads each step is a launch of its own over tiles of tokens, and memories are
sums of parts.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.linear_attention.heads import keys_of_head, of_head, tile_of_program
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
    keys,  # k (B, S, H, R), v (B, S, H, M), and a mask (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    kept,  # W (B, H, D, M), z (B, H, D) and c (B, H, M)
    y,  # (B, T, H, M)
    T,
    S,
    strides,  # token and head strides of q, k and v
    o: tl.constexpr,
):
    """Write all keys of one head into its memory, and read it with all queries.

    W, z = phi(k).T @ v, phi(k).sum(0)
    c = common(W, z)                                               # from the first block of features
    W = W - outer(z, c)
    y = phi(q) @ W / (phi(q) @ z) + c                              # `normalized`; else phi(q) @ W, without z and c
    """
    W, z, c = kept
    q_token, q_head = strides[:2]
    head = tl.program_id(0).to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o)
    k, v, k_token, v_token, mask = keys_of_head(keys, head, S, strides[2:], o)
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
    keys,  # k (B, S, H, R), v (B, S, H, M), and a mask (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    kept,  # W (B, H, D, M), z (B, H, D) and c (B, H, M), written by `attend`
    dy,  # (B, T, H, M)
    gradients,  # dq (B, T, H, R), dk (B, S, H, R) and dv (B, S, H, M)
    scale,  # (B, H, T)
    dy_y,  # (B, H, T)
    dW,  # (B, H, D, M)
    dz,  # (B, H, D)
    T,
    S,
    strides,  # token and head strides of q, k, v and dy
    o: tl.constexpr,
):
    """Compute the gradients of one head.

    dq, scale, dy_y = `query_tile` of all queries
    dW, dz = `memory_of_gradients` of all queries
    dk, dv = `key_tile` of all keys
    """
    W, z, c = kept
    dq, dk, dv = gradients
    q_token, q_head = strides[:2]
    dy_token, dy_head = strides[6:]
    head = tl.program_id(0).to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o)
    k, v, k_token, v_token, mask = keys_of_head(keys, head, S, strides[2:6], o)
    dy = of_head(dy, head, T, dy_token, dy_head, o)
    dq = of_head(dq, head, T, o.H * o.R, o.R, o)
    dk = of_head(dk, head, S, o.H * o.R, o.R, o)
    dv = of_head(dv, head, S, o.H * o.M, o.M, o)
    W += head * o.D * o.M
    dW += head * o.D * o.M
    z += head * o.D
    dz += head * o.D
    c += head * o.M
    scale += head * T
    dy_y += head * T
    for start in range(0, T, o.C):
        at = tl.cast(start, tl.int64)
        x, g, dx = q + at * q_token, dy + at * dy_token, dq + at * (o.H * o.R)
        query_tile(x, g, W, z, vectors, dx, scale + start, dy_y + start, T - start, q_token, dy_token, o)
    tl.debug_barrier()
    for first in range(0, o.D, o.block_D):
        part, sums = memory_of_gradients(q, dy, scale, dy_y, vectors, first, 0, T, q_token, dy_token, o)
        store_memory(dW, dz, part, sums, first, o)
    tl.debug_barrier()
    for start in range(0, S, o.C):
        at = tl.cast(start, tl.int64)
        x, values = k + at * k_token, v + at * v_token
        dx, d_values = dk + at * (o.H * o.R), dv + at * (o.H * o.M)
        key_tile(x, values, mask, vectors, head, dW, dz, c, dx, d_values, start, S, k_token, v_token, o)


@triton.jit
def which_part(parts, o: tl.constexpr):
    """Return the head, the part and the first feature of a program that writes."""
    program = tl.program_id(0)
    BLOCKS: tl.constexpr = (o.D + o.block_D - 1) // o.block_D
    return (program // (parts * BLOCKS)).to(tl.int64), program // BLOCKS % parts, program % BLOCKS * o.block_D


@triton.jit(do_not_specialize=["S", "heads", "size", "parts"])
def write_keys(
    keys,  # k (B, S, H, R), v (B, S, H, M), and a mask (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    W,  # (parts, B, H, D, M)
    z,  # (parts, B, H, D)
    S,
    heads,  # B H
    size,  # tokens of a part
    parts,
    strides,  # token and head strides of k and v
    o: tl.constexpr,
):
    """Write some keys of one head into a memory of their own, `block_D` features of it: `memory_of_keys`."""
    head, part, first = which_part(parts, o)
    k, v, k_token, v_token, mask = keys_of_head(keys, head, S, strides, o)
    begin = part * size
    end = tl.minimum(begin + size, S)
    W_part, z_part = memory_of_keys(k, v, mask, vectors, head, first, begin, end, S, k_token, v_token, o)
    at = part * heads + head
    store_memory(W + at * o.D * o.M, z + at * o.D, W_part, z_part, first, o)


@triton.jit(do_not_specialize=["T", "heads", "size", "parts"])
def write_gradients(
    q,  # (B, T, H, R)
    dy,  # (B, T, H, M)
    vectors,  # (m, R), of FAVOR+
    scale,  # (B, H, T)
    dy_y,  # (B, H, T)
    dW,  # (parts, B, H, D, M)
    dz,  # (parts, B, H, D)
    T,
    heads,  # B H
    size,  # tokens of a part
    parts,
    strides,  # token and head strides of q and dy
    o: tl.constexpr,
):
    """Write some queries of one head and their gradients into a memory of their own: `memory_of_gradients`."""
    q_token, q_head, dy_token, dy_head = strides
    head, part, first = which_part(parts, o)
    q = of_head(q, head, T, q_token, q_head, o)
    dy = of_head(dy, head, T, dy_token, dy_head, o)
    begin = part * size
    scale += head * T
    dy_y += head * T
    end = tl.minimum(begin + size, T)
    W_part, z_part = memory_of_gradients(q, dy, scale, dy_y, vectors, first, begin, end, q_token, dy_token, o)
    at = part * heads + head
    store_memory(dW + at * o.D * o.M, dz + at * o.D, W_part, z_part, first, o)


@triton.jit(do_not_specialize=["heads", "parts"])
def join_parts(
    W_parts,  # (parts, B, H, D, M)
    z_parts,  # (parts, B, H, D)
    joined,  # W (B, H, D, M), z (B, H, D), and c (B, H, M), which is written with `centred`
    heads,  # B H
    parts,
    o: tl.constexpr,
):
    """Add the parts of one head's memory, `block_D` features of it.

    W, z = W_parts.sum(0), z_parts.sum(0)
    c = common(W, z)                                               # with `centred`; from the first block of features
    W = W - outer(z, c)
    """
    W, z, c = joined
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
    kept,  # W (B, H, D, M), z (B, H, D), and c (B, H, M), read with `centred`
    y,  # (B, T, H, M)
    T,
    strides,  # token and head strides of q
    o: tl.constexpr,
):
    """Read the memory of one head with C queries: `read_tile`."""
    W, z, c = kept
    q_token, q_head = strides
    head, start = tile_of_program(T, o)
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
    dy_y,  # (B, H, T)
    T,
    strides,  # token and head strides of q and dy
    o: tl.constexpr,
):
    """Compute `query_tile` of C queries of one head."""
    q_token, q_head, dy_token, dy_head = strides
    head, start = tile_of_program(T, o)
    at = start.to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o) + at * q_token
    dy = of_head(dy, head, T, dy_token, dy_head, o) + at * dy_token
    dq = of_head(dq, head, T, o.H * o.R, o.R, o) + at * (o.H * o.R)
    scale += head * T + start
    dy_y += head * T + start
    query_tile(q, dy, W + head * o.D * o.M, z + head * o.D, vectors, dq, scale, dy_y, T - start, q_token, dy_token, o)


@triton.jit(do_not_specialize=["S"])
def key_gradients(
    keys,  # k (B, S, H, R), v (B, S, H, M), and a mask (B, S), read with `masked`
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
    k, v, mask = keys
    k_token, k_head, v_token, v_head = strides
    head, start = tile_of_program(S, o)
    at = start.to(tl.int64)
    k = of_head(k, head, S, k_token, k_head, o) + at * k_token
    v = of_head(v, head, S, v_token, v_head, o) + at * v_token
    dk = of_head(dk, head, S, o.H * o.R, o.R, o) + at * (o.H * o.R)
    dv = of_head(dv, head, S, o.H * o.M, o.M, o) + at * (o.H * o.M)
    dW += head * o.D * o.M
    key_tile(k, v, mask, vectors, head, dW, dz + head * o.D, c + head * o.M, dk, dv, start, S, k_token, v_token, o)
