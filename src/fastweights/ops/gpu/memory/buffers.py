"""Memory for what the kernels write."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor

from fastweights.ops.causality import Tokens
from fastweights.ops.gpu.memory.strides import Gates
from fastweights.ops.gpu.memory.variants import HALF, ChunkedWalk, Variant


class Buffer(partial[Tensor]):
    """Makes empty tensors of one shape: torch does that fastest by an example, which need not have memory."""

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        entries: tuple[int, ...] = shape if 0 in shape else ()
        return super().__new__(cls, torch.empty_like, torch.empty(entries, dtype=dtype, device=device).expand(shape))

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        dtype: torch.dtype = self.args[0].dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        return tuple(self.args[0].shape)


class Buffers:
    """What the kernels of one plan write: outputs, what is kept for the backward pass, and gradients.

    Args:
        tokens: q, k, v, a, e and w.
        state: (N, H, D, M).
        packed: bounds of packed sequences.
        dtype: that of y.
        wide: that of states.
    """

    def __init__(
        self,
        tokens: Tokens,
        state: tuple[int, int, int, int],
        packed: Tensor | None,
        dtype: torch.dtype,
        wide: torch.dtype,
        variant: Variant,
    ) -> None:
        q, _, v, *gates = tokens
        (B, T, H, _), (_, _, D, M), device = q.shape, state, q.device
        self.kept_dtype = kept = operand_dtype(q.dtype, wide, variant)
        self.y = Buffer(tuple(v.shape), dtype, device)
        self.state = Buffer(state, wide, device)
        shapes = kept_shapes((B, T, H, D), M, gates[1] is not None, packed, variant)
        self.states, self.tiles, self.errors = (Buffer(shape, kept, device) for shape in shapes)
        self.dq = Buffer(tuple(q.shape), q.dtype, device)
        self.dv = Buffer(tuple(v.shape), q.dtype, device)
        self.dright = Buffer(tuple(v.shape), kept, device)
        self.gate_gradients = tuple(None if x is None else Buffer(tuple(x.shape), x.dtype, device) for x in gates)
        keys, ends = Buffer((B, T, H, D), kept, device), Buffer((shapes[1][0], H, D), wide, device)
        self._faded = (keys, keys, keys, ends)
        # dP and G of each chunk.
        pairs = (shapes[0][0], H, 1 + (gates[1] is not None), variant.chunk, variant.chunk)
        self.pairs = Buffer(pairs, kept, device)
        self.left_out = Buffer((shapes[0][0] * H * D,), torch.int32, device)
        self._no_dgates = tuple(None if x is None else Buffer((0,), x.dtype, device) for x in gates)
        self.no_dv = Buffer((0,), q.dtype, device)
        # Nobody writes or reads these: they stand for states and gradients that are not there, or not kept.
        self.nothing = torch.empty(1, dtype=wide, device=device)
        self.unkept = torch.empty(0, dtype=kept, device=device)

    def faded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make what decays per key make of queries and keys, and what is left of a state at the end of each step."""
        q, k, rest, ends = self._faded
        return q(), k(), rest(), ends()

    def dgates(self, empty: bool) -> Gates:
        """Make the gradients of the gates, without entries where nobody writes them."""
        a, e, w = self._no_dgates if empty else self.gate_gradients
        return None if a is None else a(), None if e is None else e(), None if w is None else w()


def kept_shapes(
    shape: tuple[int, ...], M: int, erase: bool, cu_seqlens: Tensor | None, variant: Variant
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of states before chunks and of their tiles Z and P, one slot a chunk, and of tokens' errors.

    `shape` is (B, T, H, D) with the D of mapped keys. With packed sequences the number of chunks depends on
    their lengths; the number of slots bounds it.
    """
    B, T, H, D = shape

    def slots(tokens: int) -> int:
        return B * -(-T // tokens) if cu_seqlens is None else T // tokens + cu_seqlens.numel() - 1

    planes = int(erase) + int(variant.prepared) if isinstance(variant, ChunkedWalk) else 0
    tiles = (slots(variant.step) if planes else 0, H, planes, variant.step, variant.step)
    return (slots(variant.chunk), H, M, D), tiles, (B if erase else 0, T, H, M)


def operand_dtype(data: torch.dtype, state: torch.dtype, variant: Variant) -> torch.dtype:
    """Return the dtype of operands and of what is kept for backward: that of the data, or that of the state."""
    return data if variant.precision == HALF else state
