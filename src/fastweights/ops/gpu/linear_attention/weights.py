# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of linear attention for few tokens: a program has a head, and the weights between all its tokens.

Weights are sums over blocks of features. Weights and their transpose are both formed from features, since no product
may take the transpose of another.
"""

import triton
import triton.language as tl

from fastweights.ops.gpu.linear_attention.heads import (
    add_gradient,
    features,
    keys_of_head,
    level_of_keys,
    level_of_queries,
    load_entries,
    load_features,
    of_head,
    present,
    write_gradient,
)
from fastweights.ops.gpu.memory.kernels.maps import quotient
from fastweights.ops.gpu.memory.kernels.tiles import dot, load_rows, load_transposed, store_rows


@triton.jit(do_not_specialize=["T", "S"])
def weigh(
    q,  # (B, T, H, R)
    keys,  # k (B, S, H, R), v (B, S, H, M), and a mask (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    y,  # (B, T, H, M)
    T,
    S,
    strides,  # token and head strides of q, k and v
    o: tl.constexpr,
):
    """Read all keys with all queries of one head, up to C of each.

    weights = phi(q) @ phi(k).T
    y = weights / weights.sum(1, keepdim=True) @ v                 # `normalized`; else weights @ v
    """
    q_token, q_head = strides[:2]
    head = tl.program_id(0).to(tl.int64)
    q = of_head(q, head, T, q_token, q_head, o)
    k, v, k_token, v_token, mask = keys_of_head(keys, head, S, strides[2:], o)
    t = tl.arange(0, o.C)
    s = present(mask, head, 0, S, S, o)
    m = tl.arange(0, o.block_M)
    level_q = level_of_queries(q, t, T, q_token, vectors, o)
    level_k = level_of_keys(k, s, S, k_token, o)
    weights = tl.full((o.C, o.C), 0.0, o.acc)
    for first in range(0, o.D, o.block_D):
        phi_q = load_features(q, t, T, first, q_token, vectors, level_q, 1, o)
        phi_k = load_features(k, s, S, first, k_token, vectors, level_k, 0, o)
        weights += dot(phi_q, phi_k, o)
    weights = weights.to(o.operand)
    found = dot(weights, load_rows(v, s, S, m, v_token, o.M), o)
    if o.normalized:
        # What is divided by has the same roundings.
        found *= quotient(1.0, tl.sum(weights.to(o.acc), 1), o)[:, None]
    store_rows(of_head(y, head, T, o.H * o.M, o.M, o), found, t, T, m, o.H * o.M, o.M)


@triton.jit(do_not_specialize=["T", "S"])
def weigh_gradients(
    q,  # (B, T, H, R)
    keys,  # k (B, S, H, R), v (B, S, H, M), and a mask (B, S), read with `masked`
    vectors,  # (m, R), of FAVOR+
    dy,  # (B, T, H, M)
    gradients,  # dq (B, T, H, R), dk (B, S, H, R) and dv (B, S, H, M)
    T,
    S,
    strides,  # token and head strides of q, k, v and dy
    o: tl.constexpr,
):
    """Compute the gradients of one head.

        weights = phi(q) @ phi(k).T
        scores = dy @ v.T
        share = weights / weights.sum(1, keepdim=True)
        d_weights = (scores - (share * scores).sum(1, keepdim=True)) / weights.sum(1, keepdim=True)
        dv = share.T @ dy
        d_phi_q, d_phi_k = d_weights @ phi(k), d_weights.T @ phi(q)

    Without normalisation `share` is `weights` and `d_weights` is `scores`.
    """
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
    t = tl.arange(0, o.C)
    s = present(mask, head, 0, S, S, o)
    m = tl.arange(0, o.block_M)
    level_q = level_of_queries(q, t, T, q_token, vectors, o)
    level_k = level_of_keys(k, s, S, k_token, o)
    weights = tl.full((o.C, o.C), 0.0, o.acc)
    weights_t = tl.full((o.C, o.C), 0.0, o.acc)
    for first in range(0, o.D, o.block_D):
        phi_q = load_features(q, t, T, first, q_token, vectors, level_q, 1, o)
        phi_k = load_features(k, s, S, first, k_token, vectors, level_k, 0, o)
        weights += dot(phi_q, phi_k, o)
        phi_q = load_features(q, t, T, first, q_token, vectors, level_q, 0, o)
        phi_k = load_features(k, s, S, first, k_token, vectors, level_k, 1, o)
        weights_t += dot(phi_k, phi_q, o)
    g = load_rows(dy, t, T, m, dy_token, o.M)
    scores = dot(g, load_transposed(v, s, S, m, v_token, o.M, o.both_ways), o)
    values = load_rows(v, s, S, m, v_token, o.M)
    scores_t = dot(values, load_transposed(dy, t, T, m, dy_token, o.M, o.both_ways), o)
    if o.normalized:
        weights = weights.to(o.operand).to(o.acc)
        weights_t = weights_t.to(o.operand).to(o.acc)
        scale = quotient(1.0, tl.sum(weights, 1), o)
        scores = (scores - (tl.sum(weights * scores, 1) * scale)[:, None]) * scale[:, None]
        scale_t = quotient(1.0, tl.sum(weights_t, 0), o)
        scores_t = (scores_t - (tl.sum(weights_t * scores_t, 0) * scale_t)[None, :]) * scale_t[None, :]
        weights_t *= scale_t[None, :]
    store_rows(dv, dot(weights_t, g, o), t, S, m, o.H * o.M, o.M)
    scores = scores.to(o.operand)
    scores_t = scores_t.to(o.operand)
    d_q = tl.full((o.C, o.block_R), 0.0, o.acc)
    d_k = tl.full((o.C, o.block_R), 0.0, o.acc)
    for first in range(0, o.D, o.block_D):
        raw_q = load_entries(q, t, T, first, q_token, 1, o)
        raw_k = load_entries(k, s, S, first, k_token, 1, o)
        phi_q = features(q, raw_q, t, T, first, q_token, vectors, level_q, 1, o).to(o.operand)
        phi_k = features(k, raw_k, s, S, first, k_token, vectors, level_k, 1, o).to(o.operand)
        d_phi_q = dot(scores, phi_k, o)
        d_q = add_gradient(d_q, d_phi_q, q, dq, raw_q, t, T, first, q_token, T, vectors, level_q, False, o)
        d_phi_k = dot(scores_t, phi_q, o)
        d_k = add_gradient(d_k, d_phi_k, k, dk, raw_k, s, S, first, k_token, S, vectors, level_k, True, o)
    if o.whole:
        r = tl.arange(0, o.block_R)
        write_gradient(dq, d_q, t, T, r, T, o)
        write_gradient(dk, d_k, s, S, r, S, o)
