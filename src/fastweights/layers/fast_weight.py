"""`FastWeightAttention`: project, map, normalise, program and read the memory, project back."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import feature_maps
from fastweights.common.tables import at_least_one, check_name, look_up
from fastweights.layers.checks import check_dtype, check_input, check_token, head_size
from fastweights.layers.linear import Linear
from fastweights.layers.short_conv import ShortConvolution
from fastweights.ops.features import MapFeatures
from fastweights.ops.fused.gated_norm import gated_rms_norm
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import l2_normalize, smooth_l2_normalize, sum_normalize
from fastweights.ops.rules import DECAY, Gate, Rule, update_rule
from fastweights.ops.state import FastWeightState

Normalize = Callable[[Tensor], Tensor] | None

# Name -> how mapped keys and queries are normalised, and whether the memory is (Sec. 4.2).
NORMALIZATIONS: dict[str, tuple[Normalize, str | None]] = {
    "none": (None, None),
    "sum": (sum_normalize, None),
    "attention": (None, "attention"),
    "both": (sum_normalize, "attention"),
    "l2": (l2_normalize, None),
    "smooth_l2": (smooth_l2_normalize, None),
}

# Name -> whether what is read is divided by its root mean square, head by head, and what opens its gate.
OUTPUT_NORMS: dict[str, tuple[bool, str | None]] = {
    "none": (False, None),
    "rms": (True, None),
    "rms_gated": (True, "silu"),
    "rms_sigmoid": (True, "sigmoid"),
}
# Options of the layers that models in use are made of.
_MODERN = {"feature_map": "silu", "normalization": "smooth_l2", "short_conv": 4}
RECIPES: dict[str, Mapping[str, Any]] = {
    "deltanet": {"rule": "delta", **_MODERN, "output_norm": "rms"},
    "gated-deltanet": {"rule": "gated_delta", **_MODERN, "decay_per": "head", "output_norm": "rms_gated"},
    "kda": {"rule": "gated_delta", **_MODERN, "decay_per": "key", "output_norm": "rms_sigmoid"},
}
# Where exp(A) and the time step of decays exp(-exp(A) dt) start, as in Mamba-2 and its successors.
_RATES, _STEPS = (1.0, 16.0), (1e-3, 1e-1)


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
        normalization: "none", "sum", "attention", "both" (sum and attention), "l2", or "smooth_l2" with 1e-6 under the
            root.
        feature_map_options: arguments of the map, such as {"nu": 2} or {"m": 64}.
        d_value: size of a head's values if not d_head.
        project_queries: False reads with the input itself, as Eq. 3 does.
        output_scale: factor on what is read; the authors' code has d_head ** -0.5, the paper none.
        bias: biases in both projections.
        backend: see `fast_weight_memory`.
        short_conv: length of a causal convolution of each channel of q, k and v, after which values go through SiLU; 0
            for none.
        beta_max: the gate beta is between 0 and this. With 2 the delta rule can turn the sign of what it finds.
        decay_per: "head" or "key" for decays exp(-exp(A) softplus(x + dt)) with trained A and dt, one a head or one a
            key channel; None for the sigmoid of a projection.
        output_norm: "rms" divides what is read by its root mean square, "rms_gated" also multiplies it by SiLU of
            another projection of the input, and "rms_sigmoid" by the sigmoid of one; "none" does neither.

    `FastWeightAttention.recipe("gated-deltanet", d_model, n_heads)` sets these as in models in use; see `RECIPES`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int | None = None,
        rule: str | Rule = "delta",
        feature_map: str | feature_maps.FeatureMap = "elu",
        normalization: str | None = "sum",
        *,
        feature_map_options: Mapping[str, Any] | None = None,
        d_value: int | None = None,
        project_queries: bool = True,
        output_scale: float = 1.0,
        bias: bool = False,
        backend: str = "auto",
        short_conv: int = 0,
        beta_max: float = 1.0,
        decay_per: str | None = None,
        output_norm: str = "none",
    ) -> None:
        super().__init__()
        d_head = head_size(d_model, n_heads, d_head)
        if not project_queries and d_head * n_heads != d_model:
            raise ValueError(
                f"without a query projection n_heads * d_head must be d_model = {d_model}, got {n_heads} * {d_head}"
            )
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_head
        self.d_value = d_head if d_value is None else d_value
        at_least_one(d_value=self.d_value)
        self.rule = update_rule(rule)
        self.feature_map = feature_maps.feature_map(feature_map, d_head, **(feature_map_options or {}))
        self.normalization = "none" if normalization is None else normalization
        self.normalize, self.memory_normalization = look_up(NORMALIZATIONS, self.normalization, "normalization")
        self.project_queries, self.output_scale, self.backend = project_queries, output_scale, backend
        self.beta_max, self.decay_per = beta_max, decay_per
        self._check_gates()
        self.output_norm = output_norm
        normed, self.gate_activation = look_up(OUTPUT_NORMS, output_norm, "output_norm")
        gate_sizes = [self.feature_map.dim if self._per_key(gate) else 1 for gate in self.rule.gates]
        q_size = d_head if project_queries else 0
        # Of a head, in the order of the projection: q, k, v, the gate of the output, the gates of the rule.
        self.sizes = [q_size, d_head, self.d_value, self.d_value if self.gate_activation else 0, *gate_sizes]
        self.project = Linear(d_model, n_heads * sum(self.sizes), bias=bias)
        self.out = Linear(n_heads * self.d_value, d_model, bias=bias)
        self.norm = nn.RMSNorm(self.d_value, eps=1e-5) if normed else None
        self.conv = ShortConvolution(n_heads * sum(self.sizes[:3]), short_conv) if short_conv else None
        for gate in self.rule.gates:
            self._add_parameters(gate)

    @classmethod
    def recipe(cls, name: str, d_model: int, n_heads: int, d_head: int | None = None, **options: Any) -> Self:
        """Return the layer of that name in `RECIPES`, with `options` in place of the recipe's where both have one."""
        return cls(d_model, n_heads, d_head, **{**look_up(RECIPES, name, "recipe"), **options})

    def _check_gates(self) -> None:
        names = self.rule.gate_names
        if not self.beta_max > 0 or (self.beta_max != 1 and "beta" not in names):
            what = (
                "must be above 0" if "beta" in names else f"is for rules with a beta, which {self.rule.name!r} has not"
            )
            raise ValueError(f"beta_max {what}, got {self.beta_max}")
        if self.decay_per is not None:
            check_name(("head", "key"), self.decay_per, "decay_per")
            if DECAY not in self.rule.gates:
                raise ValueError(f"decay_per is for rules with a decay, which {self.rule.name!r} has not; leave it out")

    def _add_parameters(self, gate: Gate) -> None:
        """Add what a gate has beside its projection: a trained rate and time step, or a bias."""
        if self._by_rate(gate):
            self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(*_RATES).log())
            # One vector, also for all key channels of all heads: such parameters do not decay in training.
            steps = torch.empty(self.n_heads * (self.feature_map.dim if self.decay_per == "key" else 1))
            steps = steps.uniform_(*(math.log(step) for step in _STEPS)).exp()
            # softplus(dt_bias) = steps
            self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())
        elif gate.bias is not None:
            setattr(self, f"{gate.name}_bias", nn.Parameter(torch.linspace(*gate.bias, self.n_heads)))

    def _by_rate(self, gate: Gate) -> bool:
        """Return whether a gate is a decay with a trained rate."""
        return gate == DECAY and self.decay_per is not None

    def _per_key(self, gate: Gate) -> bool:
        return gate.per == "key" or (self._by_rate(gate) and self.decay_per == "key")

    def forward(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, FastWeightState]:
        """Map a whole sequence, or the next segment of one: x (B, T, d_model) -> y (B, T, d_model), state.

        `mask` (B, T) is False for padding, which then leaves no trace; `cu_seqlens` packs sequences, and `starts`
        (B, T) is True where a new one begins, see `fast_weight_memory`.
        """
        x = check_input(x, self.d_model, mask)
        if self.feature_map.training:
            self.feature_map.redraw()
        call, output_gate, recent = self.memory_inputs(x, state, mask, cu_seqlens, starts)
        y, state = fast_weight_memory(**call, state=state, mask=mask, cu_seqlens=cu_seqlens, starts=starts)
        y = self._project_back(y, output_gate)
        state = state if recent is None else replace(state, recent=recent)
        return y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0), state

    def step(
        self, x: Tensor, state: FastWeightState | None = None, in_place: bool = False
    ) -> tuple[Tensor, FastWeightState]:
        """Map one token: x (B, d_model) -> y (B, d_model), state. Memory and time do not grow with the tokens seen.

        With `in_place` the given state may be overwritten by the one that is returned.
        """
        x = check_token(x, self.d_model)
        # Random features stay as they are: a memory can only be read with the features it was written with.
        call, output_gate, recent = self.memory_inputs(x, state)
        y, state = fast_weight_memory(**call, state=state, in_place=in_place)
        y = self._project_back(y, output_gate).squeeze(1)
        return y, state if recent is None else replace(state, recent=recent)

    def memory_inputs(
        self,
        x: Tensor,
        state: FastWeightState | None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[dict[str, Any], Tensor | None, Tensor | None]:
        """Return arguments of `fast_weight_memory`, the logits of the output's gate, and the convolution's last inputs.

        The memory gets raw heads of x and logits of gates, and is told what to do with them.
        """
        check_dtype(x, self.project)
        projected, recent = self._convolve(self.project(x), state, mask, cu_seqlens, starts)
        # All heads of q, then all of k, and so on: every head starts where 16 bytes can be loaded at once.
        parts = iter(projected.split([self.n_heads * size for size in self.sizes if size], -1))
        heads: list[Any] = [next(parts).unflatten(-1, (self.n_heads, size)) if size else None for size in self.sizes]
        q, k, v, output_gate, *raw_gates = heads
        q = q if self.project_queries else x.unflatten(-1, (self.n_heads, -1))
        v = v if self.conv is None else F.silu(v)
        gates, logits = self._gates(raw_gates)
        call = {
            "q": q.to(v.dtype),
            "k": k,
            "v": v,
            "rule": self.rule,
            "normalization": self.memory_normalization,
            "backend": self.backend,
            "features": MapFeatures(self.feature_map, self.normalize, logits=logits),
            **gates,
        }
        return call, output_gate, recent

    def _convolve(
        self,
        projected: Tensor,
        state: FastWeightState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        starts: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve q, k and v, where the layer has a convolution, and return its last inputs as well."""
        if self.conv is None:
            return projected, None
        if state is not None and getattr(state, "recent", None) is None:
            raise ValueError("state has no `recent`, which a layer with a short convolution carries")
        mixed, rest = projected.split([self.conv.channels, projected.shape[-1] - self.conv.channels], -1)
        mixed, recent = self.conv(mixed, None if state is None else state.recent, mask, cu_seqlens, starts)
        return torch.cat([mixed, rest], -1), recent

    def _project_back(self, y: Tensor, output_gate: Tensor | None) -> Tensor:
        """Normalise, gate and project what all heads have read, (B, T, H, M), back to (B, T, d_model)."""
        if self.norm is not None:
            assert self.norm.eps is not None
            scale, activation = self.output_scale, self.gate_activation
            y = gated_rms_norm(y, self.norm.weight, output_gate, activation, self.norm.eps, scale)
        elif self.output_scale != 1:
            y = y * self.output_scale
        projected: Tensor = self.out(y.flatten(-2))
        return projected

    def _gates(self, raw_gates: list[Tensor]) -> tuple[dict[str, Tensor], bool]:
        """Return the rule's gates by name, and whether they are logits, except for logarithms of decays."""
        logits = self.beta_max == 1
        gates = {}
        for gate, raw in zip(self.rule.gates, raw_gates, strict=True):
            raw = raw if self._per_key(gate) else raw.squeeze(-1)
            if self._by_rate(gate):
                gates[f"log_{gate.name}"] = self._log_decay(raw)
                continue
            if gate.bias is not None:
                bias: Tensor = getattr(self, f"{gate.name}_bias")
                raw = _wide(raw) + (bias if gate.per == "head" else bias.unsqueeze(-1))
            greatest = self.beta_max if gate.name == "beta" else 1.0
            gates[gate.name] = raw if logits else greatest * _wide(raw).sigmoid()
        return gates, logits

    def _log_decay(self, raw: Tensor) -> Tensor:
        rates, bias = _wide(self.A_log).exp(), _wide(self.dt_bias)
        if self.decay_per == "key":
            rates, bias = rates.unsqueeze(-1), bias.unflatten(0, (self.n_heads, -1))
        return -rates * F.softplus(_wide(raw) + bias)

    def extra_repr(self) -> str:
        """Return what print(layer) shows."""
        return (
            f"n_heads={self.n_heads}, d_head={self.d_head}, rule={self.rule.name}, normalization={self.normalization}"
        )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
