"""Grids and arguments of the kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastweights.ops.backends.triton.backward import walk_backward
from fastweights.ops.backends.triton.configs import PRECISIONS, Config, kept_shapes, power_of_two
from fastweights.ops.backends.triton.forward import invert_chunks, walk_forward
from fastweights.ops.backends.triton.gradients import chunk_gradients

Gates = tuple[Tensor | None, Tensor | None, Tensor | None]

_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def operand_dtype(q: Tensor, W_dtype: torch.dtype, config: Config) -> torch.dtype:
    """What products take and kept states are stored in: the dtype of the data, or that of the state."""
    return q.dtype if PRECISIONS[config.precision] == "16-bit" else W_dtype


def constants(
    q: Tensor, v: Tensor, gates: Gates, cu_seqlens: Tensor | None, tied: bool, wide: torch.dtype, config: Config
) -> dict[str, Any]:
    """The compile-time arguments that all kernels take."""
    a, e, w = gates
    precision = PRECISIONS[config.precision]
    return {
        "H": q.shape[2],
        "D": q.shape[3],
        "M": v.shape[3],
        "C": config.chunk,
        "DECAY": a is not None,
        "ERASE": e is not None,
        "WRITE": w is not None,
        "TIED": tied,
        "PACKED": cu_seqlens is not None,
        "OPERAND": _TYPES[operand_dtype(q, wide, config)],
        "ACC": _TYPES[wide],
        "PRECISION": "ieee" if precision == "16-bit" else precision,
        "SOLVE": PRECISIONS[config.solve],
    }


def _addressable(x: Tensor) -> Tensor:
    """x (B, T, H, ·) with adjacent features, batches that follow each other in time, and strides that fit 32 bits."""
    flat = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    if x.stride(3) == 1 and flat and 0 <= x.stride(1) < 2**24 and 0 <= x.stride(2) < 2**31:
        return x
    return x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in (x.stride(1), x.stride(2))]


def _contiguous(gates: Gates) -> list[Tensor | None]:
    return [None if gate is None else gate.contiguous() for gate in gates]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    tied: bool,
    keep: bool,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the final W, and with `keep` the state before each chunk and the inverse of its system."""
    (_, T, H, D), M = q.shape, v.shape[3]
    q, k, v, W = _addressable(q), _addressable(k), _addressable(v), W.contiguous()
    y = torch.empty(v.shape, dtype=dtype, device=v.device)
    W_end = torch.empty_like(W)
    prepared = bool(config.prepared) and gates[1] is not None
    kept = operand_dtype(q, W.dtype, config)
    states, inverses = (
        torch.empty(shape, dtype=kept, device=q.device)
        for shape in kept_shapes(q, v, gates[1], cu_seqlens, keep, config)
    )
    a, e, w = _contiguous(gates)
    fixed = constants(q, v, gates, cu_seqlens, tied, W.dtype, config)
    block = min(config.columns, power_of_two(M))
    with torch.cuda.device_of(q):
        if prepared:
            invert_chunks[(inverses.shape[0] * H,)](
                *(k, a, e, cu_seqlens, inverses, W.shape[0], T, *_strides(k)),
                **{name: fixed[name] for name in invert_chunks.arg_names if name in fixed},
                BLOCK_D=min(config.features, power_of_two(D)),
                num_warps=config.invert_warps,
                num_stages=1,
            )
        walk_forward[(W.shape[0] * H * -(-M // block),)](
            *(q, k, v, a, e, w, W, cu_seqlens, y, W_end, states, inverses),
            *(T, *_strides(q, k, v)),
            **fixed,
            BLOCK_D=power_of_two(D),
            BLOCK_M=block,
            KEEP=keep,
            PREPARED=prepared,
            num_warps=config.forward_warps,
            num_stages=config.forward_stages,
        )
    return y, W_end, states, inverses


def backward(
    dy: Tensor,
    dW_end: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    states: Tensor,
    inverses: Tensor,
    cu_seqlens: Tensor | None,
    tied: bool,
    wide: torch.dtype,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor]:
    """Gradients of q, k, v, the gates and the initial W."""
    (B, T, H, D), M = q.shape, v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    q, k, v, dy = _addressable(q), _addressable(k), _addressable(v), _addressable(dy)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    a, e, w = _contiguous(gates)
    da, de, dw = (None if gate is None else torch.empty_like(gate) for gate in (a, e, w))
    dW = torch.empty((N, H, D, M), dtype=wide, device=q.device)
    dW_end = None if dW_end is None else dW_end.contiguous()
    fixed = constants(q, v, gates, cu_seqlens, tied, wide, config)
    fused = bool(config.fused)
    # The second launch reads the right side's gradient as an operand. dv will do where it is that, unrounded further.
    separate = not fused and (tied or w is not None or states.dtype != v.dtype)
    dright = torch.empty(v.shape, dtype=states.dtype, device=v.device) if separate else dv
    dstates = states if fused else torch.empty_like(states)
    block = power_of_two(M) if fused else min(config.columns, power_of_two(M))
    inputs = (q, k, v, a, e, w, cu_seqlens, states, inverses, dy)
    with torch.cuda.device_of(q):
        walk_backward[(N * H * -(-M // block),)](
            *(*inputs, dW_end, dq, dk, dv, da, de, dw, dW, dstates, dright),
            *(T, *_strides(q, k, v, dy)),
            **fixed,
            BLOCK_D=power_of_two(D),
            BLOCK_M=block,
            FUSED=fused,
            FINAL=dW_end is not None,
            RIGHT=separate,
            num_warps=config.backward_warps,
            num_stages=config.backward_stages,
        )
        if not fused:
            chunk_gradients[(states.shape[0] * H,)](
                *(*inputs, dq, dk, da, de, dw, dstates, dright),
                *(N, T, *_strides(q, k, v, dy)),
                **fixed,
                BLOCK_D=min(config.features, power_of_two(D)),
                BLOCK_M=power_of_two(M),
                num_warps=config.chunk_warps,
                num_stages=1,
            )
    return dq, dk, dv, [da, de, dw], dW
