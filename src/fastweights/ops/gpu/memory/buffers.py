"""Memory for what the kernels write."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Self

import torch
from torch import Tensor

from fastweights.ops.gpu.memory.strides import Gates
from fastweights.ops.gpu.memory.variants import Variant, kept_shapes, operand_dtype


class Buffer(partial[Tensor]):
    """Makes empty tensors of one shape: with shape and strides at hand, torch takes two thirds of the time for it."""

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return super().__new__(cls, torch.empty_strided, shape, strides, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        dtype: torch.dtype = self.keywords["dtype"]
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensors."""
        return tuple(self.args[0])


class Buffers:
    """What the kernels of one plan write: outputs, what is kept for the backward pass, and gradients.

    Args:
        q, v, gates: the inputs.
        state: (N, H, D, M).
        packed: bounds of packed sequences.
        dtype: that of y.
        wide: that of states.
    """

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        gates: Gates,
        state: tuple[int, int, int, int],
        packed: Tensor | None,
        dtype: torch.dtype,
        wide: torch.dtype,
        variant: Variant,
    ) -> None:
        (B, T, H, _), (_, _, D, M), device = q.shape, state, q.device
        self.kept_dtype = kept = operand_dtype(q.dtype, wide, variant)
        self.y = Buffer(tuple(v.shape), dtype, device)
        self.state = Buffer(state, wide, device)
        shapes = (kept_shapes((B, T, H, D), M, gates[1] is not None, packed, keep, variant) for keep in (False, True))
        self._kept = tuple(tuple(Buffer(shape, kept, device) for shape in several) for several in shapes)
        self.slots = self._kept[1][0].shape[0]
        self.inverses = self._kept[1][1].shape[0]
        self.dq = Buffer(tuple(q.shape), q.dtype, device)
        self.dv = Buffer(tuple(v.shape), q.dtype, device)
        self.dright = Buffer(tuple(v.shape), kept, device)
        self._dgates = tuple(None if x is None else Buffer((B, T, H), x.dtype, device) for x in gates)
        self._no_dgates = tuple(None if x is None else Buffer((0,), x.dtype, device) for x in gates)
        self.no_dv = Buffer((0,), q.dtype, device)
        # Nobody writes or reads it: it stands for states and gradients that are not there.
        self.nothing = torch.empty(1, dtype=wide, device=device)

    def kept(self, keep: bool) -> tuple[Buffer, Buffer, Buffer]:
        """Return buffers for chunks' first states and inverses and tokens' errors, empty where they are not kept."""
        states, inverses, errors = self._kept[keep]
        return states, inverses, errors

    def dgates(self, empty: bool) -> Gates:
        """Make the gradients of the gates, without entries where nobody writes them."""
        a, e, w = (None if buffer is None else buffer() for buffer in (self._no_dgates if empty else self._dgates))
        return a, e, w
