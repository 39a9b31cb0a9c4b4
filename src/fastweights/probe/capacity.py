"""How many random associations a memory holds, by rule and feature map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastweights.common.tables import check_name, look_up
from fastweights.feature_maps import feature_map as make_map
from fastweights.layers.fast_weight import NORMALIZATIONS
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import l2_normalize
from fastweights.ops.rules import Rule, update_rule
from fastweights.probe.reading import recall
from fastweights.report.style import COLOURS, MARKERS, SETTINGS, TICK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_SIZES = 48


@dataclass(frozen=True)
class Capacity:
    """The error of a memory over the number of associations in it.

    Attributes:
        label: the rule and the feature map.
        d_dot: the size of mapped keys: no memory holds more associations exactly.
        sizes: numbers of associations, rising.
        errors: for each of them, the root mean square of the relative error over all associations and trials.
        bound: the error up to which a memory holds them.
    """

    label: str
    d_dot: int
    sizes: tuple[int, ...]
    errors: tuple[float, ...]
    bound: float

    @property
    def held(self) -> int:
        """The last of `sizes` before the error first passes the bound; 0 if the first does already."""
        held = 0
        for size, error in zip(self.sizes, self.errors, strict=True):
            if not error <= self.bound:
                break
            held = size
        return held


@torch.no_grad()
def capacity(
    rule: str | Rule = "delta",
    feature_map: str = "identity",
    d_key: int = 16,
    *,
    d_value: int = 16,
    sizes: Sequence[int] | None = None,
    bound: float = 0.5,
    normalization: str = "l2",
    passes: int = 1,
    trials: int = 16,
    seed: int = 0,
    feature_map_options: Mapping[str, Any] | None = None,
    **gates: float,
) -> Capacity:
    """Write random associations until they are read with too large an error; nothing is trained.

    Keys are drawn from a normal distribution and go through the map and the normalisation, values are random directions
    of length 1. All are written, one after the other, and then all are read.

    Args:
        rule: a name from `list_rules()` or an `update_rule(...)`.
        feature_map: a name from `list_feature_maps()`.
        d_key: size of keys before the map.
        d_value: size of values.
        sizes: numbers of associations to try; by default from 1 to twice d_dot, at most 48 of them.
        bound: the error, relative to a value's length, up to which a memory holds its associations.
        normalization: of a layer, such as "l2", "sum" or "attention".
        passes: how often all associations are written, one pass after the other. The delta rule corrects itself: with
            many passes it holds up to d_dot of them.
        trials: memories, with keys and values of their own.
        seed: the same seed gives the same numbers.
        feature_map_options: arguments of the map, such as {"nu": 2}.
        **gates: the value of a gate at every step; 1 by default, so that beta writes in full and nothing fades.
    """
    rule = update_rule(rule)
    for name, least in (("trials", trials), ("passes", passes)):
        if least < 1:
            raise ValueError(f"{name} must be at least 1, got {least}")
    for name in gates:
        check_name(rule.idle, name, f"gate of rule {rule.name!r}")
    generator = torch.Generator().manual_seed(seed)
    phi = make_map(feature_map, d_key, **(feature_map_options or {})).double().eval()
    phi.redraw(generator)
    normalize, memory_normalization = look_up(NORMALIZATIONS, normalization, "normalization")
    tried = _sizes(sizes, phi.dim)
    most = tried[-1]

    def normal(d: int) -> Tensor:
        return torch.randn(trials, most, 1, d, generator=generator, dtype=torch.float64)

    keys = phi(normal(d_key))
    keys = keys if normalize is None else normalize(keys)
    values = l2_normalize(normal(d_value))
    errors = []
    for size in tried:
        k, v = keys[:, :size].repeat(1, passes, 1, 1), values[:, :size].repeat(1, passes, 1, 1)
        constant: Any = {
            gate.name: k.new_full(k.shape[:3] if gate.per == "head" else k.shape, gates.get(gate.name, 1.0))
            for gate in rule.gates
        }
        _, state = fast_weight_memory(k, k, v, rule=rule, normalization=memory_normalization, **constant)
        error = recall(state, keys[:, :size], values[:, :size]).error
        assert error is not None
        errors.append(error.square().mean().sqrt().item())
    options = "".join(f", {name} {value}" for name, value in (feature_map_options or {}).items())
    repeated = f", {passes} passes" if passes > 1 else ""
    return Capacity(f"{rule.name}, {feature_map}{options}{repeated}", phi.dim, tried, tuple(errors), bound)


def _sizes(given: Sequence[int] | None, d_dot: int) -> tuple[int, ...]:
    if given is None:
        return tuple(range(1, 2 * d_dot + 1, -(-2 * d_dot // MOST_SIZES)))
    sizes = tuple(given)
    if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
        raise ValueError(f"sizes must be whole numbers of at least 1 that rise, got {list(sizes)}")
    return sizes


def plot_capacity(curves: Sequence[Capacity]) -> Figure:
    """Draw the error over the number of associations, a line for each memory; `figure.savefig(path)` writes it.

    A marker shows how many associations each memory holds. It needs matplotlib: pip install 'fastweights[experiments]'.
    """
    import matplotlib
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("there is nothing to draw; give what `capacity` returned, as a list")
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(6.6, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel="associations written", title="error of what is read, relative to the value")
        for number, curve in enumerate(curves):
            colour = list(COLOURS.values())[(number + 1) % len(COLOURS)][0]
            marker = MARKERS[number % len(MARKERS)]
            named = f"{curve.label}: holds {curve.held} (d_dot {curve.d_dot})"
            axes.plot(curve.sizes, curve.errors, color=colour, label=named, linewidth=1.6)
            if curve.held:
                axes.plot(curve.held, curve.errors[curve.sizes.index(curve.held)], marker, color=colour, markersize=7)
        for bound in {curve.bound for curve in curves}:
            axes.axhline(bound, color=TICK, linewidth=1, linestyle=(0, (2, 3)))
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.legend()
    return figure
