"""`FastWeightAttention`: project, map, normalise, program and read the memory, project back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.common.tables import look_up
from fastweights.feature_maps import FeatureMap, feature_map
from fastweights.layers.checks import check_dtype, check_input, check_token, head_size
from fastweights.ops.features import MapFeatures
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import smooth_l2_normalize, sum_normalize
from fastweights.ops.rules import Gate, Rule, update_rule
from fastweights.ops.state import FastWeightState

Normalize = Callable[[Tensor], Tensor] | None

# Name -> how mapped keys and queries are normalised, and whether the memory is (Sec. 4.2).
NORMALIZATIONS: dict[str, tuple[Normalize, str | None]] = {
    "none": (None, None),
    "sum": (sum_normalize, None),
    "attention": (None, "attention"),
    "both": (sum_normalize, "attention"),
    "l2": (smooth_l2_normalize, None),
}


class FastWeightAttention(nn.Module):
    """Multi-head fast-weight attention: Eqs. 4 and 20-25 of the paper, with any rule, feature map and normalisation.

    Equivalent to

        q, k, v, beta = split(x @ W_qkvb)                       # per head, no bias
        q, k = sum_normalize(phi(q)), sum_normalize(phi(k))
        y, state = fast_weight_memory(q, k, v, rule="delta", beta=sigmoid(beta), state=state)
        y = concat_heads(y) @ W_out

    Args:
        d_model: size of the input and output.
        n_heads: number of heads, each with its own memory.
        d_head: size of queries, keys and values of a head; d_model / n_heads if None.
        rule: a name from `list_rules()` or an `update_rule(name, **options)`. Each gate it takes is one more output of
            the projection per head (per key channel where the gate has one each), through a sigmoid.
        feature_map: a name from `list_feature_maps()` or a `FeatureMap` of d_key = d_head.
        normalization: "none", "sum", "attention", "both" (sum and attention) or "l2".
        feature_map_options: arguments of the map, such as {"nu": 2} or {"m": 64}.
        d_value: size of a head's values if not d_head.
        project_queries: False reads with the input itself, as Eq. 3 does.
        output_scale: factor on what is read; the authors' code has d_head ** -0.5, the paper none.
        bias: biases in both projections.
        backend: see `fast_weight_memory`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int | None = None,
        rule: str | Rule = "delta",
        feature_map: str | FeatureMap = "elu",
        normalization: str | None = "sum",
        *,
        feature_map_options: Mapping[str, Any] | None = None,
        d_value: int | None = None,
        project_queries: bool = True,
        output_scale: float = 1.0,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        d_head = head_size(d_model, n_heads, d_head)
        if not project_queries and d_head * n_heads != d_model:
            raise ValueError(
                f"without a query projection n_heads * d_head must be d_model = {d_model}, got {n_heads} * {d_head}"
            )
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_head
        self.d_value = d_head if d_value is None else d_value
        self.rule = update_rule(rule)
        self.feature_map = _feature_map(feature_map, d_head, feature_map_options)
        self.normalization = "none" if normalization is None else normalization
        self.normalize, self.memory_normalization = look_up(NORMALIZATIONS, self.normalization, "normalization")
        self.project_queries, self.output_scale, self.backend = project_queries, output_scale, backend
        gate_sizes = [1 if gate.per == "head" else self.feature_map.dim for gate in self.rule.gates]
        self.sizes = [d_head if project_queries else 0, d_head, self.d_value, *gate_sizes]
        self.project = nn.Linear(d_model, n_heads * sum(self.sizes), bias=bias)
        self.out = nn.Linear(n_heads * self.d_value, d_model, bias=bias)
        for gate in self.rule.gates:
            if gate.bias is not None:
                bias_of_gate = torch.linspace(*gate.bias, n_heads)
                setattr(self, f"{gate.name}_bias", nn.Parameter(bias_of_gate))

    def forward(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, FastWeightState]:
        """A whole sequence, or the next segment of one: x (B, T, d_model) -> y (B, T, d_model), state.

        `mask` (B, T) is False for padding, which then leaves no trace; `cu_seqlens` packs sequences, and `starts`
        (B, T) is True where a new one begins, see `fast_weight_memory`.
        """
        x = check_input(x, self.d_model, mask)
        if self.feature_map.training:
            self.feature_map.redraw()
        heads = self._heads(x)
        y, state = fast_weight_memory(**heads, state=state, mask=mask, cu_seqlens=cu_seqlens, starts=starts)
        y = self._join(y)
        return y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0), state

    def step(
        self, x: Tensor, state: FastWeightState | None = None, in_place: bool = False
    ) -> tuple[Tensor, FastWeightState]:
        """One token: x (B, d_model) -> y (B, d_model), state. Memory and time do not grow with the tokens seen.

        With `in_place` the given state may be overwritten by the one that is returned.
        """
        x = check_token(x, self.d_model)
        # Random features stay as they are: a memory can only be read with the features it was written with.
        y, state = fast_weight_memory(**self._heads(x), state=state, in_place=in_place)
        return self._join(y).squeeze(1), state

    def _heads(self, x: Tensor) -> dict[str, Any]:
        """Return what the memory takes: raw heads of x and logits of gates, and what to do with them."""
        check_dtype(x, self.project)
        # All heads of q, then all of k, and so on: every head starts where 16 bytes can be loaded at once.
        parts = self.project(x).split([self.n_heads * size for size in self.sizes], -1)
        q, k, v, *gates = (
            part.unflatten(-1, (self.n_heads, size)) for part, size in zip(parts, self.sizes, strict=True)
        )
        q = q if self.project_queries else x.unflatten(-1, (self.n_heads, -1))
        return {
            "q": q.to(v.dtype),
            "k": k,
            "v": v,
            "rule": self.rule,
            "normalization": self.memory_normalization,
            "backend": self.backend,
            "features": MapFeatures(self.feature_map, self.normalize, logits=True),
            **{gate.name: self._logit(gate, raw) for gate, raw in zip(self.rule.gates, gates, strict=True)},
        }

    def _join(self, y: Tensor) -> Tensor:
        """Project what all heads have read, (B, T, H, M), back to (B, T, d_model)."""
        projected: Tensor = self.out(y.flatten(-2) * self.output_scale)
        return projected

    def _logit(self, gate: Gate, raw: Tensor) -> Tensor:
        """Return what a gate is the sigmoid of, in at least float32 where a bias is added."""
        raw = raw.squeeze(-1) if gate.per == "head" else raw
        if gate.bias is None:
            return raw
        bias: Tensor = getattr(self, f"{gate.name}_bias")
        wide = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return wide + (bias if gate.per == "head" else bias.unsqueeze(-1))

    def extra_repr(self) -> str:
        """Shown by print(layer)."""
        return (
            f"n_heads={self.n_heads}, d_head={self.d_head}, rule={self.rule.name}, normalization={self.normalization}"
        )


def _feature_map(phi: str | FeatureMap, d_head: int, options: Mapping[str, Any] | None) -> FeatureMap:
    """The map, of the right size."""
    if isinstance(phi, FeatureMap) and phi.d_key != d_head:
        raise ValueError(f"feature_map is for d_key = {phi.d_key}, but a head has d_head = {d_head}")
    return feature_map(phi, d_head, **(options or {}))
