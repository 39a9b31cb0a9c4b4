"""What a layer carries from one token, segment or beam to the next."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

StateClass = TypeVar("StateClass", bound=type)


def register_state(cls: StateClass) -> StateClass:
    """Let `torch.load(weights_only=True)`, `torch.export` and `tree_map` know a dataclass of tensors and lists."""
    torch.export.register_dataclass(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    torch.serialization.add_safe_globals([cls])
    return cls


@dataclass(eq=False)
class State:
    """Named tensors with the batch first. Subclasses name their fields and are decorated with `register_state`."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def detach(self) -> Self:
        """Cut the values off from the graph: memory is carried to the next segment, gradients are not."""
        return self._map(Tensor.detach)

    def clone(self) -> Self:
        """Return a copy that later steps on either side leave alone."""
        return self._map(Tensor.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert as `Tensor.to` does; a dtype is for floating-point numbers, and leaves masks and positions alone."""

        def convert(x: Tensor) -> Tensor:
            converted = x.to(*args, **kwargs)
            return converted if x.is_floating_point() else converted.to(x.dtype)

        return self._map(convert)

    def reorder(self, index: Tensor) -> Self:
        """Make row `index[i]` row i; rows may repeat, so beams can fork."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    @property
    def nbytes(self) -> int:
        """Count the bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load` reads back."""
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, str(path), self._metadata())

    def _metadata(self) -> dict[str, str] | None:
        """Return what `load` needs to know beside the tensors."""
        return None

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
