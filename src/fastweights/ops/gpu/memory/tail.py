# mypy: disable-error-code="no-untyped-def"
"""Zeros for the tokens after the last packed sequence, where that is: only the device knows."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.gpu.launcher import Launch
from fastweights.ops.gpu.memory.buffers import Buffer

PROGRAMS, WARPS = 256, 4


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the kernel is compiled for: the entries of a token in each output, and those that are written at once."""

    rows: tuple[int, ...]
    block: int = 1024


@triton.jit(do_not_specialize=["N", "T"])
def clear_tail(
    outputs,  # of (T, o.rows[i]) each, or None
    cu_seqlens,  # (N + 1,)
    N,
    T,
    o: tl.constexpr,
):
    """Set `x[cu_seqlens[N]:] = 0` for each x of the outputs."""
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + N).to(tl.int64), 0), T)
    for i in tl.static_range(len(o.rows)):
        if outputs[i] is not None:
            entries = T.to(tl.int64) * o.rows[i]
            first = end * o.rows[i] + tl.program_id(0) * o.block
            for block in range(first, entries, tl.num_programs(0) * o.block):
                at = block + tl.arange(0, o.block)
                tl.store(outputs[i] + at, 0, at < entries)


class Tail:
    """What clears the outputs of a packed call that these buffers make, each with the tokens on its second axis."""

    def __init__(self, buffers: tuple[Buffer | None, ...], cu_seqlens: Tensor) -> None:
        dtypes = tuple(None if x is None else x.dtype for x in buffers)
        rows = tuple(0 if x is None else prod(x.shape[2:]) for x in buffers)
        self.launch = Launch(
            clear_tail, PROGRAMS, (dtypes, cu_seqlens.dtype), 2, (Options(rows=rows),), WARPS, 1, cu_seqlens.device
        )

    def clear(self, outputs: tuple[Any, ...], cu_seqlens: Tensor | None, T: int) -> None:
        """Write zeros after the last bound."""
        assert cu_seqlens is not None
        self.launch((outputs, cu_seqlens), cu_seqlens.numel() - 1, T)
