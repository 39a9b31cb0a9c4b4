"""What a layer carries from one token, segment or beam to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

StateClass = TypeVar("StateClass", bound=type)


def register_state(cls: StateClass) -> StateClass:
    """Let `torch.load(weights_only=True)`, `torch.export` and `tree_map` know a dataclass of tensors and lists."""

    def flatten(state: Any) -> tuple[list[Any], list[str]]:
        named = {f.name: getattr(state, f.name) for f in fields(cls)}
        there = {name: value for name, value in named.items() if value is not None}
        return list(there.values()), list(there)

    def flatten_with_keys(state: Any) -> tuple[list[Any], list[str]]:
        values, names = flatten(state)
        return [(pytree.GetAttrKey(name), value) for name, value in zip(names, values, strict=True)], names

    pytree.register_pytree_node(
        cls,
        flatten,
        lambda values, names: cls(**dict(zip(names, values, strict=True))),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([cls])
    return cls


@dataclass(eq=False)
class State:
    """Named tensors with the batch first. Subclasses name their fields and are decorated with `register_state`."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by field name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def detach(self) -> Self:
        """The same values cut off from the graph: carries memory, not gradient, to the next segment."""
        return self._map(Tensor.detach)

    def clone(self) -> Self:
        """A copy that later steps on either side leave alone."""
        return self._map(Tensor.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As `Tensor.to`; a dtype is for the numbers and leaves masks bool."""
        return self._map(lambda x: x.to(*args, **kwargs).bool() if x.dtype == torch.bool else x.to(*args, **kwargs))

    def reorder(self, index: Tensor) -> Self:
        """Row `index[i]` becomes row i; rows may repeat, so beams can fork."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load` reads back."""
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in self.tensors().items()}, str(path))

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> Self:
        """Read what `save` wrote; a file of another kind of state is refused."""
        from safetensors.torch import load_file

        tensors = load_file(str(path), device=str(device))
        names = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.default is MISSING}
        if not needed <= set(tensors) <= names:
            raise ValueError(
                f"{path} holds {sorted(tensors)}, not a {cls.__name__} (fields: {sorted(names)}, of which it needs "
                f"{sorted(needed)}); it was saved from another kind of layer"
            )
        return cls(**tensors)


@register_state
@dataclass(eq=False)
class FastWeightState(State):
    """Fast weights W (B, H, D, M) and, under attention normalisation, the accumulator z (B, H, D).

    A layer with a short convolution adds `recent`, the last inputs of that.
    """

    W: Tensor
    z: Tensor | None = None
    recent: Tensor | None = None
