"""The sequence layers by name. To add one: a class with `forward` and `step`, and its line in `MIXERS`.

`forward(x, state, mask)` takes a whole sequence or the next segment of one, x (B, T, d_model), and `step(x, state)` one
token, x (B, d_model). Both return y in the shape of x, and the state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fastweights.common.tables import look_up
from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.layers.relative import RelativeAttention, SegmentMemory
from fastweights.layers.softmax import KeyValueState, SoftmaxAttention
from fastweights.ops.state import FastWeightState, State, register_state


@dataclass(frozen=True)
class MixerKind:
    """A sequence layer: how it is made, what it carries, and how much.

    Attributes:
        build: makes the layer from d_model, n_heads, d_head and the options.
        options: names of the options, and what `build` calls them.
        state: what `forward` returns beside y.
        size: numbers that a layer needs of the past for a segment of that length, as App. F counts them.
        forgets: whether `forward` takes `starts` (B, T), and forgets all before where a new text begins.
    """

    build: Callable[..., nn.Module]
    options: Mapping[str, str]
    state: type[State]
    size: Callable[[Any, int], int]
    forgets: bool = False


def _fast_weight(d_model: int, n_heads: int, d_head: int, *, output_scale: bool = False, **options: Any) -> nn.Module:
    scale = d_head**-0.5 if output_scale else 1.0
    return FastWeightAttention(d_model, n_heads, d_head, output_scale=scale, **options)


def _fast_weight_size(layer: Any, segment: int) -> int:
    carried = 0 if layer.conv is None else (layer.conv.taps - 1) * layer.conv.channels
    return int(layer.n_heads * layer.feature_map.dim * layer.d_value + carried)


_OF_FAST_WEIGHTS = (
    *("rule", "feature_map", "feature_map_options", "normalization", "output_scale"),
    *("short_conv", "beta_max", "decay_per", "output_norm"),
)

MIXERS: dict[str, MixerKind] = {
    "fast_weight": MixerKind(
        _fast_weight,
        {name: name for name in _OF_FAST_WEIGHTS},
        FastWeightState,
        _fast_weight_size,
        forgets=True,
    ),
    "softmax": MixerKind(
        SoftmaxAttention,
        {"attention_dropout": "dropout"},
        KeyValueState,
        lambda layer, segment: segment * 2 * layer.n_heads * layer.d_head,
    ),
    "relative": MixerKind(
        RelativeAttention,
        {"mem_len": "mem_len", "clamp_len": "clamp_len", "attention_dropout": "dropout"},
        SegmentMemory,
        lambda layer, segment: (layer.mem_len + segment) * 2 * layer.n_heads * layer.d_head,
    ),
}


def mixer(name: str, d_model: int, n_heads: int, d_head: int, **options: Any) -> nn.Module:
    """Build the layer of that name: `mixer("fast_weight", 128, 8, 16, rule="sum", normalization="attention")`."""
    kind = look_up(MIXERS, name, "mixer")
    for option in options:
        if option not in kind.options:
            raise ValueError(f"mixer {name!r} has no option {option!r} (it takes: {', '.join(kind.options)})")
    return kind.build(d_model, n_heads, d_head, **{kind.options[name]: value for name, value in options.items()})


@register_state
@dataclass(eq=False)
class StackState(State):
    """What a stack of layers carries from one segment or token to the next."""

    layers: list[State]
    position: Tensor  # (B,) tokens seen so far

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all layers, as "0.W", and "position"."""
        named = {f"{i}.{name}": x for i, layer in enumerate(self.layers) for name, x in layer.tensors().items()}
        return {**named, "position": self.position}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)([layer._map(function) for layer in self.layers], function(self.position))

    @property
    def numel(self) -> int:
        """Return how many numbers the layers hold for each row."""
        held = sum(tensor.numel() for layer in self.layers for tensor in layer.tensors().values())
        return held // len(self.position)

    def _metadata(self) -> dict[str, str]:
        return {"kinds": " ".join(type(layer).__name__ for layer in self.layers)}

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> Self:
        """Read what `save` wrote; any other file is refused."""
        from safetensors import safe_open

        known = {kind.state.__name__: kind.state for kind in MIXERS.values()}
        with safe_open(str(path), "pt", device=str(device)) as file:
            kinds = (file.metadata() or {}).get("kinds", "").split()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        if not kinds or not {*kinds} <= {*known} or "position" not in tensors:
            raise ValueError(f"{path} holds {sorted(tensors)[:6]} ..., not what {cls.__name__}.save writes")
        position = tensors.pop("position")
        layers: list[dict[str, Tensor]] = [{} for _ in kinds]
        for name, tensor in tensors.items():
            layer, entry = name.split(".")
            layers[int(layer)][entry] = tensor
        return cls([known[kind](**entries) for kind, entries in zip(kinds, layers, strict=True)], position)
