"""What a layer carries from one token, segment or beam to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(eq=False)
class State:
    """Named tensors with the batch first. Subclasses only name their fields."""

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

        found = load_file(str(path), device=str(device))
        known = {f.name for f in fields(cls)}
        if not found or not set(found) <= known:
            raise ValueError(
                f"{path} holds {sorted(found)}, not a {cls.__name__} (fields: {sorted(known)}); "
                "it was saved from another kind of layer"
            )
        return cls(**found)


@dataclass(eq=False)
class FastWeightState(State):
    """Fast weights W (B, H, D, M) and, under attention normalisation, the accumulator z (B, H, D)."""

    W: Tensor
    z: Tensor | None = None
