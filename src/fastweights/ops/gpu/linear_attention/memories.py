# mypy: disable-error-code="no-untyped-def"
"""The memory of a head on chip: written by a stretch of keys, read by a tile of queries, and the gradients of tiles.

It is W = sum of phi(k) v^T (D, M) and z, the sum of phi(k) (D,). What is kept is W - z c^T, with c what values have in
common (`common`), in the dtype of operands: what c makes of any result is known without rounding. For the gradients
queries write a memory dW, dz, which keys read.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.linear_attention.heads import (
    add_gradient,
    features,
    level_of_keys,
    level_of_queries,
    load_entries,
    load_features,
    present,
    write_gradient,
)
from fastweights.ops.gpu.memory.kernels.maps import quotient
from fastweights.ops.gpu.memory.kernels.tiles import dot, load_columns, load_rows, store_rows


@triton.jit
def memory_of_keys(k, v, mask, vectors, head, first, begin, end, S, k_token, v_token, o: tl.constexpr):
    """Compute W and z of the keys of a head from `begin` to `end`, for `block_D` features from `first` on.

    W, z = phi(k).T @ v, phi(k).sum(0)
    """
    W = tl.full((o.block_D, o.block_M), 0.0, o.acc)
    z = tl.full((o.block_D,), 0.0, o.acc)
    m = tl.arange(0, o.block_M)
    for start in range(begin, end, o.C):
        at = tl.cast(start, tl.int64)
        rows = present(mask, head, at, S, end - start, o)
        x = k + at * k_token
        level = level_of_keys(x, rows, end - start, k_token, o)
        phi = load_features(x, rows, end - start, first, k_token, vectors, level, 0, o)
        W += dot(phi, load_rows(v + at * v_token, rows, end - start, m, v_token, o.M), o)
        z += tl.sum(phi.to(o.acc), 1)
    return W, z


@triton.jit
def memory_of_gradients(q, dy, scale, dy_y, vectors, first, begin, end, q_token, dy_token, o: tl.constexpr):
    """Compute dW and dz of the queries of a head from `begin` to `end`, for `block_D` features from `first` on.

    dW, dz = (phi(q) * scale).T @ dy, -(phi(q) * scale).T @ dy_y

    For FAVOR+ `scale` is the level that has the same effect.
    """
    dW = tl.full((o.block_D, o.block_M), 0.0, o.acc)
    dz = tl.full((o.block_D,), 0.0, o.acc)
    m = tl.arange(0, o.block_M)
    rows = tl.arange(0, o.C)
    for start in range(begin, end, o.C):
        at = tl.cast(start, tl.int64)
        left = end - start
        x = q + at * q_token
        raw = load_entries(x, rows, left, first, q_token, 0, o)
        factor = tl.full((o.C,), 1.0, o.acc)
        if o.normalized:
            factor = tl.load(scale + at + rows, rows < left, 0.0)
        phi = features(x, raw, rows, left, first, q_token, vectors, factor, 0, o)
        if o.normalized and o.map != "favor":
            phi *= factor[None, :]
        phi = phi.to(o.operand)
        dW += dot(phi, load_rows(dy + at * dy_token, rows, left, m, dy_token, o.M), o)
        if o.normalized:
            dz -= tl.sum(phi.to(o.acc) * tl.load(dy_y + at + rows, rows < left, 0.0)[None, :], 1)
    return dW, dz


@triton.jit
def common(W, z, o: tl.constexpr):
    """Return what all values have in common, c (M,), with which W - z c^T is smallest; 0 where W is not much larger.

    c = z @ W / (z @ z)

    A value that stands out, and that few queries find, then does not decide how the others are rounded.
    """
    shared = tl.sum(W * z[:, None], 0)
    square = tl.sum(z * z, 0)
    much = shared * shared > 0.5 * square * tl.sum(W * W, 0)
    return tl.where(much, shared / tl.where(square > 0, square, 1.0), 0.0)


@triton.jit
def store_memory(W_at, z_at, W, z, first, o: tl.constexpr):
    """Write `block_D` features from `first` on of a memory (D, M), (D,)."""
    d = first + tl.arange(0, o.block_D)
    store_rows(W_at, W, d, o.D, tl.arange(0, o.block_M), o.M, o.M)
    if o.normalized:
        tl.store(z_at + d, z, d < o.D)


@triton.jit
def recalled(q, W, z, vectors, left, q_token, o: tl.constexpr):
    """Compute phi(q) W (C, M) and phi(q)·z (C,) of a tile of queries."""
    rows = tl.arange(0, o.C)
    m = tl.arange(0, o.block_M)
    found = tl.full((o.C, o.block_M), 0.0, o.acc)
    total = tl.full((o.C,), 0.0, o.acc)
    level = level_of_queries(q, rows, left, q_token, vectors, o)
    for first in range(0, o.D, o.block_D):
        d = first + tl.arange(0, o.block_D)
        phi = load_features(q, rows, left, first, q_token, vectors, level, 1, o)
        found += dot(phi, load_rows(W, d, o.D, m, o.M, o.M), o)
        if o.normalized:
            total += tl.sum(phi.to(o.acc) * tl.load(z + d, d < o.D, 0.0)[None, :], 1)
    return found, total


@triton.jit
def read_tile(q, W, z, c, vectors, y, left, q_token, o: tl.constexpr):
    """Read the memory of a head with a tile of queries.

    y = phi(q) @ W / (phi(q) @ z) + c                              # `normalized`; else phi(q) @ W
    """
    found, total = recalled(q, W, z, vectors, left, q_token, o)
    m = tl.arange(0, o.block_M)
    if o.normalized:
        scale = quotient(1.0, total, o)
        found *= scale[:, None]
        if o.centred:
            found += tl.where((scale != 0)[:, None], tl.load(c + m, m < o.M, 0.0)[None, :], 0.0)
    store_rows(y, found, tl.arange(0, o.C), left, m, o.H * o.M, o.M)


@triton.jit
def query_tile(q, dy, W, z, vectors, dq, scale, dy_y, left, q_token, dy_token, o: tl.constexpr):
    """Compute the gradient of a tile of queries, and two numbers of each query for `memory_of_gradients`.

        scale = 1 / (phi(q) @ z)
        dy_y = (dy @ W.T * phi(q)).sum(1) * scale                  # dy·(y - c)
        d_phi_q = (dy @ W.T - outer(dy_y, z)) * scale

    Without normalisation d_phi_q is dy @ W.T.
    """
    rows = tl.arange(0, o.C)
    m = tl.arange(0, o.block_M)
    g = load_rows(dy, rows, left, m, dy_token, o.M)
    # With all features in one block everything is computed once.
    WHOLE: tl.constexpr = o.block_D >= o.D
    total = tl.full((o.C,), 0.0, o.acc)
    product = tl.full((o.C,), 0.0, o.acc)
    factor = tl.full((o.C,), 1.0, o.acc)
    level = level_of_queries(q, rows, left, q_token, vectors, o)
    if o.normalized and not WHOLE:
        for first in range(0, o.D, o.block_D):
            d = first + tl.arange(0, o.block_D)
            phi = load_features(q, rows, left, first, q_token, vectors, level, 1, o).to(o.acc)
            total += tl.sum(phi * tl.load(z + d, d < o.D, 0.0)[None, :], 1)
            product += tl.sum(phi * dot(g, load_columns(W, d, o.D, m, o.M, o.M), o), 1)
    found = tl.full((o.C, o.block_R), 0.0, o.acc)
    for first in range(0, o.D, o.block_D):
        d = first + tl.arange(0, o.block_D)
        raw = load_entries(q, rows, left, first, q_token, 1, o)
        d_phi = dot(g, load_columns(W, d, o.D, m, o.M, o.M), o)
        if o.normalized:
            sums = tl.load(z + d, d < o.D, 0.0)
            if WHOLE:
                phi = features(q, raw, rows, left, first, q_token, vectors, level, 1, o).to(o.operand).to(o.acc)
                total = tl.sum(phi * sums[None, :], 1)
                product = tl.sum(phi * d_phi, 1)
            factor = quotient(1.0, total, o)
            d_phi = (d_phi - (product * factor)[:, None] * sums[None, :]) * factor[:, None]
        found = add_gradient(found, d_phi, q, dq, raw, rows, left, first, q_token, left, vectors, level, False, o)
    if o.whole:
        write_gradient(dq, found, rows, left, tl.arange(0, o.block_R), left, o)
    if o.normalized:
        tl.store(dy_y + rows, product * factor, rows < left)
        if o.map == "favor":
            factor = tl.where(factor > 0, level + tl.log(tl.where(factor > 0, total, 1.0)), float("inf"))
        tl.store(scale + rows, factor, rows < left)


@triton.jit
def key_tile(k, v, mask, vectors, head, dW, dz, c, dk, dv, start, S, k_token, v_token, o: tl.constexpr):
    """Compute the gradients of a tile of keys and values, from the memory dW, dz that queries have written.

        d_phi_k = (v - c) @ dW.T + dz
        dv = phi(k) @ dW

    Without normalisation d_phi_k is v @ dW.T.
    """
    left = S - start
    rows = present(mask, head, start, S, left, o)
    m = tl.arange(0, o.block_M)
    values = load_rows(v, rows, left, m, v_token, o.M)
    if o.normalized:
        # Rows that are not read have to stay 0, since they are multiplied by what is not.
        off = tl.load(c + m, m < o.M, 0.0)[None, :]
        values = tl.where((rows < left)[:, None], values.to(o.acc) - off, 0.0).to(o.operand)
    found = tl.full((o.C, o.block_R), 0.0, o.acc)
    d_values = tl.full((o.C, o.block_M), 0.0, o.acc)
    level = level_of_keys(k, rows, left, k_token, o)
    for first in range(0, o.D, o.block_D):
        d = first + tl.arange(0, o.block_D)
        raw = load_entries(k, rows, left, first, k_token, 1, o)
        phi = features(k, raw, rows, left, first, k_token, vectors, level, 1, o).to(o.operand)
        d_values += dot(phi, load_rows(dW, d, o.D, m, o.M, o.M), o)
        d_phi = dot(values, load_columns(dW, d, o.D, m, o.M, o.M), o)
        if o.normalized:
            d_phi += tl.load(dz + d, d < o.D, 0.0)[None, :]
        found = add_gradient(found, d_phi, k, dk, raw, rows, left, first, k_token, left, vectors, level, True, o)
    if o.whole:
        write_gradient(dk, found, rows, left, tl.arange(0, o.block_R), left, o)
    store_rows(dv, d_values, tl.arange(0, o.C), left, m, o.H * o.M, o.M)
