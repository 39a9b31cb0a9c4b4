"""Memory for what the kernels write."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor

from fastweights.ops.causality import Tokens
from fastweights.ops.gpu.memory.strides import Gates
from fastweights.ops.gpu.memory.variants import Variant, kept_shapes, operand_dtype


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
        self._dgates = tuple(None if x is None else Buffer((B, T, H), x.dtype, device) for x in gates)
        self._no_dgates = tuple(None if x is None else Buffer((0,), x.dtype, device) for x in gates)
        self.no_dv = Buffer((0,), q.dtype, device)
        # Nobody writes or reads these: they stand for states and gradients that are not there, or not kept.
        self.nothing = torch.empty(1, dtype=wide, device=device)
        self.unkept = torch.empty(0, dtype=kept, device=device)

    def dgates(self, empty: bool) -> Gates:
        """Make the gradients of the gates, without entries where nobody writes them."""
        a, e, w = self._no_dgates if empty else self._dgates
        return None if a is None else a(), None if e is None else e(), None if w is None else w()
