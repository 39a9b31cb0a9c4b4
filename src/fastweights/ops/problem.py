"""One checked call of the memory, as every backend receives it.

B batch, T time, H heads, D = d_dot (keys and queries after phi), M = d_value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from fastweights.ops.features import PLAIN, Features
from fastweights.ops.rules import Rule


@dataclass(frozen=True, eq=False)
class Problem:
    """q, k (B, T, H, D), v (B, T, H, M), gates (B, T, H) each, W (N, H, D, M), z (N, H, D) or None.

    N is B, or the number of packed sequences. z is there exactly when attention normalisation is asked for. Where
    `mask` (B, T) is False, q, k and v are zero and the gates say "change nothing" already; only a rule outside the
    family has to look at it. Where `starts` (B, T) is True, W and z are emptied before that token. q, k and the gates
    may be raw: `features` are what they have to go through first, and D is the size they have then. With `in_place` the
    memory of W and z may be used again for what they become.
    """

    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    W: Tensor
    z: Tensor | None = None
    cu_seqlens: Tensor | None = None
    mask: Tensor | None = None
    starts: Tensor | None = None
    features: Features = PLAIN
    in_place: bool = False

    def mapped(self) -> Problem:
        """Return the same with keys, queries and gates as they go into the memory.

        What a memory under attention normalisation is divided by may be next to nothing, and 16 bits have no room for
        the gradients that mapped keys and queries then have, although raw ones have moderate ones. So all become
        float32 there, and y as well; but for GPUs, on which products of 16 bits are several times faster.
        """
        if self.features == PLAIN:
            return self
        phi, widened = self.features.of, self.z is not None and not self.q.is_cuda
        q, k, v = (x.to(self.state_dtype if widened else x.dtype) for x in (self.q, self.k, self.v))
        gates = {name: self.features.gate(gate) for name, gate in self.gates.items()}
        return replace(self, q=phi(q), k=phi(k), v=v, gates=gates, features=PLAIN)

    @property
    def state_dtype(self) -> torch.dtype:
        """What state and sums are kept in: at least float32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def unpack(self) -> Iterator[Problem]:
        """The packed sequences one by one, each a batch of one."""
        assert self.cu_seqlens is not None
        bounds = self.cu_seqlens.tolist()
        for i, (start, end) in enumerate(pairwise(bounds)):
            span = slice(start, end)
            yield replace(
                self,
                q=self.q[:, span],
                k=self.k[:, span],
                v=self.v[:, span],
                gates={name: gate[:, span] for name, gate in self.gates.items()},
                W=self.W[i : i + 1],
                z=None if self.z is None else self.z[i : i + 1],
                mask=None if self.mask is None else self.mask[:, span],
                starts=None if self.starts is None else self.starts[:, span],
                cu_seqlens=None,
            )
