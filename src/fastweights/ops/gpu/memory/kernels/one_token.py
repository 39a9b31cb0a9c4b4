# mypy: disable-error-code="no-untyped-def"
"""One token for every sequence and head in one launch: the memory is read, changed and written once.

A program takes some value columns of one memory. There is nothing to multiply by matrices here, and no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.features import Features
from fastweights.ops.gpu.memory.kernels.maps import quotient, vector_features
from fastweights.ops.gpu.memory.kernels.tiles import exponential
from fastweights.ops.gpu.memory.launcher import MOST_SHAPES, Constants, Start, kind_of, paced
from fastweights.ops.gpu.memory.plan import TYPES
from fastweights.ops.gpu.memory.strides import Gates, even


@triton.jit(do_not_specialize=["given"])
def take_step(
    q,
    k,
    v,
    a,
    e,
    w,
    W,
    z,
    y,
    W_end,
    z_end,
    given,
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    gate_batch,
    gate_head,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DECAY: tl.constexpr,
    ERASE: tl.constexpr,
    WRITE: tl.constexpr,
    TIED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    MAP: tl.constexpr,
    SUM: tl.constexpr,
    LOGITS: tl.constexpr,
    ACC: tl.constexpr,
):
    splits: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    # Heads may lie far apart: where there is one token, any layout is taken as it comes.
    head = ((program // splits) % H).to(tl.int64)
    n = (program // (splits * H)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    m = (program % splits) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (d[:, None] < D) & (m[None, :] < M)
    memory = n * H + head
    at = memory * D * M + d[:, None] * M + m[None, :]
    gate = n * gate_batch + head * gate_head

    W_ = tl.load(W + at, inside & (given != 0), 0.0).to(ACC)
    k_ = vector_features(k + n * k_batch + head * k_head, d, R, D, MAP, SUM, ACC)
    q_ = vector_features(q + n * q_batch + head * q_head, d, R, D, MAP, SUM, ACC)
    u = tl.load(v + n * v_batch + head * v_head + m, m < M, 0.0).to(ACC)
    counted = k_
    if NORMALIZED:
        z_ = tl.load(z + memory * D + d, (d < D) & (given != 0), 0.0).to(ACC)
    if DECAY:
        fade = load_number(a + gate, LOGITS, ACC)
        W_ *= fade
        if NORMALIZED:
            z_ *= fade
    if WRITE:
        write = load_number(w + gate, LOGITS, ACC)
        u *= write
        if not ERASE:
            counted *= write
    if ERASE:
        erase = load_number(e + gate, LOGITS, ACC)
        recall = tl.sum(W_ * k_[:, None], 0)
        if NORMALIZED:
            recall = quotient(recall, tl.sum(z_ * k_, 0), ACC)
        if TIED:
            u *= erase
        u -= erase * recall
    W_ += k_[:, None] * u[None, :]
    out = tl.sum(W_ * q_[:, None], 0)
    if NORMALIZED:
        z_ += counted
        out = quotient(out, tl.sum(z_ * q_, 0), ACC)
        tl.store(z_end + memory * D + d, z_, (d < D) & (program % splits == 0))
    tl.store(y + memory * M + m, out.to(y.dtype.element_ty), m < M)
    tl.store(W_end + at, W_, inside)


@triton.jit
def load_number(x, LOGITS: tl.constexpr, ACC: tl.constexpr):
    """One gate of one token."""
    gate = tl.load(x).to(ACC)
    if LOGITS:
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
    known = _starts.get(key)
    if known is None:
        if len(_starts) >= MOST_SHAPES:
            _starts.clear()
        _starts[key] = known = _start(q, k, v, gates, dtype, tied, normalized, features)
    start, D, wide, is_even = known
    if not is_even:
        a, e, w = even(gates, 0)[0]
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
    start((q, k, v, a, e, w, W if given else W_end, z if given else z_end, y, W_end, z_end), int(given))
    return y, W_end, z_end


_starts: dict[tuple[Any, ...], tuple[Start, int, torch.dtype, bool]] = {}


def _start(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, dtype: torch.dtype, tied: bool, normalized: bool, features: Features
) -> tuple[Start, int, torch.dtype, bool]:
    """The launch for these shapes, D, the dtype of states, and whether the gates can be read as they are."""
    (B, _, H, R), M = q.shape, v.shape[3]
    D, wide = features.size(R), torch.promote_types(q.dtype, torch.float32)
    block_d = triton.next_power_of_2(D)
    block_m = min(triton.next_power_of_2(M), max(4096 // block_d, 16))
    ready, gate_strides = even(gates, 0)
    a, e, w = ready
    strides = (*(s for x in (q, k, v) for s in (x.stride(0), x.stride(2))), *gate_strides)
    kinds = tuple(None if x is None else x.dtype for x in ready)
    depends_on = (q.device.index, q.dtype, dtype, kinds, H, R, M, strides, tied, normalized, features)
    constants: Constants = {
        "H": H,
        "R": R,
        "D": D,
        "M": M,
        "BLOCK_D": block_d,
        "BLOCK_M": block_m,
        "DECAY": a is not None,
        "ERASE": e is not None,
        "WRITE": w is not None,
        "TIED": tied,
        "NORMALIZED": normalized,
        "MAP": features.map,
        "SUM": bool(features.sum),
        "LOGITS": bool(features.logits),
        "ACC": TYPES[wide],
    }
    pace = paced(max(1, min(8, block_d * block_m // 1024)), 1)
    programs = B * H * -(-M // block_m)
    start = Start(take_step, depends_on, programs, strides, lambda: constants, pace, q.device)
    return start, D, wide, all(x is y for x, y in zip(ready, gates, strict=True))
