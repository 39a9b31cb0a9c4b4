# mypy: disable-error-code="no-untyped-def"
"""One token for every sequence and head in one launch: the memory is read, changed and written once.

A program takes some value columns of one memory. There is nothing to multiply by matrices here, and no gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.gpu.common import exponential
from fastweights.ops.gpu.memory.kernels.maps import quotient, vector_features


@triton.jit(do_not_specialize=["given"])
def take_step(
    q,  # (B, 1, H, R)
    k,  # (B, 1, H, R)
    v,  # (B, 1, H, M)
    gates,  # a, e, w, each (B, 1, H) or None; with decays per key, a is their logarithms (B, 1, H, D)
    W,  # (B, H, D, M)
    z,  # (B, H, D), attention normalisation's accumulator, or None
    y,  # (B, 1, H, M)
    W_end,  # (B, H, D, M)
    z_end,  # (B, H, D) or None
    given,
    strides,  # batch and head strides of q, k, v and the gates
    o: tl.constexpr,
):
    """Take one token of one head, for some value columns; W and z are zero where they are not `given`.

    q, k = phi(q), phi(k)
    W, z = W * a, z * a                                     # (D, M), (D,)
    recall = k @ W / (z @ k)                                # divided only with attention normalisation
    U = w * v - e * recall
    W = W + outer(k, U)
    z = z + k                                               # w * k for a rule that only adds
    y = q @ W / (z @ q)
    """
    a, e, w = gates
    q_batch, q_head, k_batch, k_head, v_batch, v_head, gate_batch, gate_head = strides
    splits: tl.constexpr = (o.M + o.block_M - 1) // o.block_M
    program = tl.program_id(0)
    # Heads may lie far apart: where there is one token, any layout is taken as it comes.
    head = ((program // splits) % o.H).to(tl.int64)
    n = (program // (splits * o.H)).to(tl.int64)
    d = tl.arange(0, o.block_D)
    m = (program % splits) * o.block_M + tl.arange(0, o.block_M)
    inside = (d[:, None] < o.D) & (m[None, :] < o.M)
    memory = n * o.H + head
    at = memory * o.D * o.M + d[:, None] * o.M + m[None, :]
    gate = n * gate_batch + head * gate_head

    W_ = tl.load(W + at, inside & (given != 0), 0.0).to(o.acc)
    k_ = vector_features(k + n * k_batch + head * k_head, d, o)
    q_ = vector_features(q + n * q_batch + head * q_head, d, o)
    u = tl.load(v + n * v_batch + head * v_head + m, m < o.M, 0.0).to(o.acc)
    counted = k_
    if o.normalized:
        z_ = tl.load(z + memory * o.D + d, (d < o.D) & (given != 0), 0.0).to(o.acc)
    if o.per_key:
        fade = exponential(tl.load(a + memory * o.D + d, d < o.D, 0.0).to(o.acc))
        W_ *= fade[:, None]
        if o.normalized:
            z_ *= fade
    elif o.decay:
        fade = load_number(a + gate, o)
        W_ *= fade
        if o.normalized:
            z_ *= fade
    if o.write:
        write = load_number(w + gate, o)
        u *= write
        if not o.erase:
            counted *= write
    if o.erase:
        erase = load_number(e + gate, o)
        recall = tl.sum(W_ * k_[:, None], 0)
        if o.normalized:
            recall = quotient(recall, tl.sum(z_ * k_, 0), o)
        if o.tied:
            u *= erase
        u -= erase * recall
    W_ += k_[:, None] * u[None, :]
    out = tl.sum(W_ * q_[:, None], 0)
    if o.normalized:
        z_ += counted
        out = quotient(out, tl.sum(z_ * q_, 0), o)
        tl.store(z_end + memory * o.D + d, z_, (d < o.D) & (program % splits == 0))
    tl.store(y + memory * o.M + m, out.to(y.dtype.element_ty), m < o.M)
    tl.store(W_end + at, W_, inside)


@triton.jit
def load_number(x, o: tl.constexpr):
    """One gate of one token."""
    gate = tl.load(x).to(o.acc)
    if o.logits:
        gate = 1.0 / (1.0 + exponential(-gate))
    return gate
