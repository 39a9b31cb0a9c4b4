"""`FastWeightAttention`: project, map, normalise, program and read the memory, project back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.common.tables import look_up
from fastweights.feature_maps import DPFP, ELU, FeatureMap, ReLU, feature_map
from fastweights.layers.checks import check_dtype, check_input, check_token, head_size
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import l2_normalize, sum_normalize
from fastweights.ops.rules import Rule, update_rule
from fastweights.ops.state import FastWeightState

# Maps that kernels compute from raw heads.
_FUSED: dict[type[FeatureMap], str] = {ELU: "elu", ReLU: "relu", DPFP: "dpfp"}

Normalize = Callable[[Tensor], Tensor] | None

# Name -> how mapped keys and queries are normalised, and whether the memory is (Sec. 4.2).
NORMALIZATIONS: dict[str, tuple[Normalize, str | None]] = {
    "none": (None, None),
    "sum": (sum_normalize, None),
    "attention": (None, "attention"),
    "both": (sum_normalize, "attention"),
    "l2": (l2_normalize, None),
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
            the projection per head, through a sigmoid.
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
        self.sizes = [d_head if project_queries else 0, d_head, self.d_value, *[1] * len(self.rule.gates)]
        self.project = nn.Linear(d_model, n_heads * sum(self.sizes), bias=bias)
        self.out = nn.Linear(n_heads * self.d_value, d_model, bias=bias)
        if "decay" in self.rule.gates:
            # Memories that at first last from about ten to a few hundred steps, one span per head.
            self.decay_bias = nn.Parameter(torch.linspace(2, 6, n_heads))

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
        return self._attend(x, state, mask, cu_seqlens, starts)

    def step(
        self, x: Tensor, state: FastWeightState | None = None, in_place: bool = False
    ) -> tuple[Tensor, FastWeightState]:
        """One token: x (B, d_model) -> y (B, d_model), state. Memory and time do not grow with the tokens seen.

        With `in_place` the given state may be overwritten by the one that is returned.
        """
        x = check_token(x, self.d_model)
        # Random features stay as they are: a memory can only be read with the features it was written with.
        y, state = self._attend(x, state, in_place=in_place)
        return y.squeeze(1), state

    def _attend(
        self,
        x: Tensor,
        state: FastWeightState | None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, FastWeightState]:
        check_dtype(x, self.project)
        # All heads of q, then all of k, and so on: every head starts where 16 bytes can be loaded at once.
        parts = self.project(x).split([self.n_heads * size for size in self.sizes], -1)
        q, k, v, *gates = (
            part.unflatten(-1, (self.n_heads, size)) for part, size in zip(parts, self.sizes, strict=True)
        )
        q = q if self.project_queries else x.unflatten(-1, (self.n_heads, -1))
        features = _features(self.feature_map, self.normalize)
        if features is None:
            q, k = self._map(q, k)
        y, state = fast_weight_memory(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            rule=self.rule,
            **{
                name: self._gate(name, gate, features is not None)
                for name, gate in zip(self.rule.gates, gates, strict=True)
            },
            normalization=self.memory_normalization,
            cu_seqlens=cu_seqlens,
            state=state,
            backend=self.backend,
            mask=mask,
            starts=starts,
            features=PLAIN if features is None else features,
            in_place=in_place,
        )
        y = self.out(y.flatten(-2) * self.output_scale)
        return y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0), state

    def _map(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        phi = self.feature_map
        if self.normalize is not None:
            return self.normalize(phi.scaled(q)), self.normalize(phi.scaled(k))
        return phi.scaled(q) if self.memory_normalization == "attention" else phi.map(q), phi.map(k)

    def _gate(self, name: str, raw: Tensor, logit: bool) -> Tensor:
        """A gate in (0, 1), at least float32: a decay next to 1 has no room in 16 bits. Or the `logit` of it."""
        raw = raw.squeeze(-1)
        if name == "decay":
            raw = raw.to(torch.promote_types(raw.dtype, torch.float32)) + self.decay_bias
        if logit:
            return raw
        return raw.to(torch.promote_types(raw.dtype, torch.float32)).sigmoid()

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


def _features(phi: FeatureMap, normalize: Normalize) -> Features | None:
    """The map and normalisation as kernels know them, if they do; gates then come as logits."""
    name = _FUSED.get(type(phi))
    if name is None or normalize not in (None, sum_normalize):
        return None
    return Features.named(name, getattr(phi, "nu", 0), normalize is not None, logits=True)
