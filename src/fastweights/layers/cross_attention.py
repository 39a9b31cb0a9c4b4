"""Attention without a direction of time: a sequence is remembered once and read by any number of queries.

An encoder reads the sentence that it remembers, a decoder reads that of the encoder:

    memory = layer.remember(sentence, mask)                             # once
    y = layer(x, memory)                                                # as often as wanted
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastweights import feature_maps
from fastweights.layers.checks import check_dropout, check_dtype, check_input, head_size
from fastweights.layers.linear import Linear
from fastweights.layers.padding import PaddedState, attend, check_state
from fastweights.layers.softmax import KeyValueState
from fastweights.ops.features import MapFeatures
from fastweights.ops.linear_attention import linear_attention, read_memory, write_memory
from fastweights.ops.state import FastWeightState, State, register_state


class CrossAttention(nn.Module):
    """What both kinds share: the projections, and beams that read one memory.

    `remember` keeps B sequences. `forward` reads with N = n B rows, of which n neighbours share a sequence: beams of
    one sentence need one memory, not n copies.
    """

    def __init__(self, d_model: int, n_heads: int, d_head: int | None = None) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, head_size(d_model, n_heads, d_head)
        self.query = Linear(d_model, n_heads * self.d_head, bias=False)
        self.key_value = Linear(d_model, 2 * n_heads * self.d_head, bias=False)
        self.out = Linear(n_heads * self.d_head, d_model, bias=False)

    def remember(self, x: Tensor, mask: Tensor | None = None) -> State:
        """Return the memory of x (B, S, d_model); `mask` (B, S) is False for padding, which leaves no trace."""
        x = check_input(x, self.d_model, mask)
        check_dtype(x, self.key_value)
        k, v = self.key_value(x).unflatten(-1, (2, self.n_heads, self.d_head)).unbind(-3)
        return self._write(k, v, mask)

    def forward(self, x: Tensor, memory: State) -> Tensor:
        """Read the memory with x (N, T, d_model): (N, T, d_model)."""
        x = check_input(x, self.d_model, None)
        check_dtype(x, self.query)
        if not isinstance(memory, State):
            raise TypeError(f"memory must be what `remember` returns, got {type(memory).__name__}")
        N, T = x.shape[:2]
        B = len(next(iter(memory.tensors().values())))
        if N % B:
            raise ValueError(f"{N} rows cannot share {B} memories equally; rows of one sequence are neighbours")
        q = self.query(x).unflatten(-1, (self.n_heads, self.d_head)).reshape(B, N // B * T, self.n_heads, self.d_head)
        y = self._read(q, memory).reshape(N, T, self.n_heads * self.d_head)
        return self.out(y)

    def _write(self, k: Tensor, v: Tensor, mask: Tensor | None) -> State:
        raise AssertionError("a subclass says how keys and values are kept")

    def _read(self, q: Tensor, memory: Any) -> Tensor:
        raise AssertionError("a subclass says how they are read")

    def extra_repr(self) -> str:
        """Return what print(layer) shows."""
        return f"n_heads={self.n_heads}, d_head={self.d_head}"


class SoftmaxCrossAttention(CrossAttention):
    """Softmax attention, Eqs. 4-7 over a whole sequence: its memory is every key and value.

    Equivalent to, for each head,

        k, v = split(sentence @ W_kv)
        y = softmax(x @ W_q @ k.mT / sqrt(d_head), -1) @ v @ W_out
    """

    def __init__(self, d_model: int, n_heads: int, d_head: int | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads, d_head)
        self.dropout = check_dropout(dropout)

    def _write(self, k: Tensor, v: Tensor, mask: Tensor | None) -> KeyValueState:
        return KeyValueState(k, v, mask=mask)

    def _read(self, q: Tensor, memory: Any) -> Tensor:
        entry = (self.n_heads, self.d_head)
        memory = check_state(memory, KeyValueState, {"k": entry, "v": entry}, q)
        seen = memory.mask
        if seen is not None:
            # A softmax over nothing is NaN; a row without any token finds zeros, for its keys and values come from 0.
            seen = (seen | ~seen.any(1, keepdim=True))[:, None, None]
        return attend(q, memory.k, memory.v, seen, self.dropout if self.training else 0.0)


@register_state
@dataclass(eq=False)
class RawState(PaddedState):
    """k and v of every token, from which W and z follow: what the way back needs anyway."""

    k: Tensor
    v: Tensor


class FastWeightCrossAttention(CrossAttention):
    """Linear attention, Eq. 14 with the sums over a whole sequence: its memory is W and z, of one size for any length.

    In training mode a memory is read once, and `linear_attention` finds the cheaper way: it is kept as k and v.

    Equivalent to, for each head,

        k, v = split(sentence @ W_kv)
        W, z = phi(k).mT @ v, phi(k).sum(0)
        y = (phi(x @ W_q) @ W) / (phi(x @ W_q) @ z) @ W_out
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int | None = None,
        *,
        feature_map: str = "elu",
        feature_map_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, d_head)
        self.feature_map = feature_maps.feature_map(feature_map, self.d_head, **(feature_map_options or {}))

    @property
    def features(self) -> MapFeatures:
        """What raw heads go through; whether inside of kernels is theirs to say."""
        return MapFeatures(self.feature_map)

    def _write(self, k: Tensor, v: Tensor, mask: Tensor | None) -> State:
        if self.feature_map.training:
            # Random features are drawn here and stay: a memory can only be read with those it was written with.
            self.feature_map.redraw()
        return RawState(k, v, mask=mask) if self.training else write_memory(k, v, mask, features=self.features)

    def _read(self, q: Tensor, memory: Any) -> Tensor:
        if not isinstance(memory, FastWeightState | RawState):
            raise TypeError(f"the memory must be a FastWeightState or a RawState, got {type(memory).__name__}")
        if isinstance(memory, RawState):
            # Written under autocast, it may be read without.
            k, v = memory.k.to(q.dtype), memory.v.to(q.dtype)
            return linear_attention(q, k, v, memory.mask, features=self.features)
        return read_memory(q, memory, features=self.features)
