# mypy: disable-error-code="no-untyped-def"
"""One token for every sequence and head in one launch: the memory is read, changed and written once.

A program takes some value columns of one memory. There is nothing to multiply by matrices here, and no gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.features import Features
from fastweights.ops.gpu.memory.kernels.maps import quotient, vector_features
from fastweights.ops.gpu.memory.kernels.options import Options
from fastweights.ops.gpu.memory.kernels.tiles import exponential
from fastweights.ops.gpu.memory.launcher import Launch, dtype_of, kind_of, planned
from fastweights.ops.gpu.memory.plan import TYPES, map_options
from fastweights.ops.gpu.memory.strides import Gates, common_strides


@triton.jit(do_not_specialize=["given"])
def take_step(
    q,  # (B, 1, H, R)
    k,  # (B, 1, H, R)
    v,  # (B, 1, H, M)
    gates,  # a, e, w, each (B, 1, H) or None
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
    if o.decay:
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


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    W: Tensor | None,
    z: Tensor | None,
    dtype: torch.dtype,
    tied: bool,
    normalized: bool,
    in_place: bool,
    features: Features,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y (B, 1, H, M), W and z after one token; zeros before it where they are None. `in_place` may overwrite W."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return step(q, k, v, gates, W, z, dtype, tied, normalized, in_place, features)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    a, e, w = gates
    shapes = (q.shape, q.stride(), k.stride(), v.shape, v.stride(), kind_of(a), kind_of(e), kind_of(w))
    key = (*shapes, q.dtype, q.device, dtype, tied, normalized, features)
    launch, D, wide, as_given = planned(key, lambda: _plan(q, k, v, gates, dtype, tied, normalized, features))
    if not as_given:
        gates = common_strides(gates, 0)[0]
    B, _, H, M = v.shape
    device = q.device
    y = torch.empty(v.shape, dtype=dtype, device=device)
    given = W is not None
    W = None if W is None else W.contiguous()
    # After a segment with attention normalisation it is a column of a larger state.
    z = None if z is None else z.contiguous()
    W_end = W if in_place and W is not None else torch.empty((B, H, D, M), dtype=wide, device=device)
    # Every program reads z, and only one writes it: the new one needs a place of its own.
    z_end = torch.empty((B, H, D), dtype=wide, device=device) if normalized else None
    launch((q, k, v, gates, W if given else W_end, z if given else z_end, y, W_end, z_end), int(given))
    return y, W_end, z_end


def _plan(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, dtype: torch.dtype, tied: bool, normalized: bool, features: Features
) -> tuple[Launch, int, torch.dtype, bool]:
    """The launch for these shapes, D, the dtype of states, and whether the gates can be read as they are."""
    (B, _, H, R), M, data = q.shape, v.shape[3], q.dtype
    D, wide = features.size(R), torch.promote_types(data, torch.float32)
    block_D = triton.next_power_of_2(D)
    block_M = min(triton.next_power_of_2(M), max(4096 // block_D, 16))
    ready, gate_strides = common_strides(gates, 0)
    strides = (*(s for x in (q, k, v) for s in (x.stride(0), x.stride(2))), *gate_strides)
    a, e, w = (dtype_of(gate) for gate in ready)
    options = Options(
        **map_options(features, R),
        H=H,
        M=M,
        block_D=block_D,
        block_M=block_M,
        decay=a is not None,
        erase=e is not None,
        write=w is not None,
        tied=tied,
        normalized=normalized,
        acc=TYPES[wide],
    )
    z = wide if normalized else None
    dtypes = (data, data, data, (a, e, w), wide, z, dtype, wide, z)
    programs, warps = B * H * -(-M // block_M), max(1, min(8, block_D * block_M // 1024))
    launch = Launch(take_step, programs, dtypes, 1, (strides, options), warps, 1, q.device)
    return launch, D, wide, all(x is y for x, y in zip(ready, gates, strict=True))
