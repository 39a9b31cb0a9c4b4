"""States of streams in fewer bits: fast weights in bfloat16, fp8 or int8, with or without error feedback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.models.language_model import LanguageModelState
from fastweights.ops.state import FastWeightState


class Format(NamedTuple):
    """How numbers are stored, and the largest of them where rows are scaled to it."""

    dtype: torch.dtype
    largest: float | None = None


FORMATS: dict[str, Format] = {
    "bf16": Format(torch.bfloat16),
    "fp8": Format(torch.float8_e4m3fn, 448.0),
    "int8": Format(torch.int8, 127.0),
}


@dataclass(frozen=True)
class Packed:
    """A tensor in fewer bits: `values` times `scale`, one for each row, and what rounding lost of that, if it is kept.

    Equivalent to, for int8,

        scale = x.abs().amax(-1, keepdim=True) / 127
        values = (x / scale).round()
        rest = the same of x - values * scale
    """

    values: Tensor
    scale: Tensor | None = None
    rest: Packed | None = None

    @classmethod
    def of(cls, x: Tensor, format: Format, keep_rest: bool = False) -> Packed:
        """Round x; with `keep_rest`, what is lost by that is rounded and kept as well."""
        scale, scaled = None, x
        if format.largest is not None:
            scale = x.abs().amax(-1, keepdim=True) / format.largest
            scaled = x / scale.where(scale != 0, 1)
        values = (scaled.round() if format.dtype == torch.int8 else scaled).to(format.dtype)
        packed = cls(values, scale)
        return cls(values, scale, cls.of(x - packed.unpack(x.dtype), format)) if keep_rest else packed

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor, as far as it was kept."""
        x = self.values.to(dtype)
        x = x if self.scale is None else x * self.scale
        return x if self.rest is None else x + self.rest.unpack(dtype)

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield what is stored, by names that begin with `name`; `from_tensors` reads them."""
        yield name, self.values
        if self.scale is not None:
            yield f"{name}_scale", self.scale
        if self.rest is not None:
            yield from self.rest.tensors(f"{name}_rest")

    @classmethod
    def from_tensors(cls, name: str, tensors: dict[str, Tensor]) -> Packed:
        """Take the tensor of this name back out of `tensors`."""
        values, scale = tensors.pop(name), tensors.pop(f"{name}_scale", None)
        rest = cls.from_tensors(f"{name}_rest", tensors) if f"{name}_rest" in tensors else None
        return cls(values, scale, rest)


@dataclass(frozen=True)
class Compression:
    """How a stream keeps its fast weights between two parts of a text.

    Attributes:
        format: "bf16" (2 bytes a number), "fp8" or "int8" (1 byte, and 4 for the scale of each row of W).
        error_feedback: keep what rounding lost in as many bits again, and add it before the next rounding: small
            changes of W then add up instead of being lost each time anew.

    The accumulator of attention normalisation and the inputs of a short convolution, which are small, stay as they are.
    """

    format: str
    error_feedback: bool = False

    def __post_init__(self) -> None:
        look_up(FORMATS, self.format, "state_format")

    def compress(self, state: LanguageModelState) -> CompressedState:
        """Round the fast weights of a state."""
        layers = []
        for layer in state.layers:
            if not isinstance(layer, FastWeightState):
                raise ValueError(f"state_format is for fast weights, got a {type(layer).__name__}; leave it out")
            layers.append(CompressedLayer(self.round(layer.W), layer.z, layer.recent))
        return CompressedState(layers, state.position, self)

    def round(self, W: Tensor) -> Packed:
        """Round fast weights (..., D, M), each row of M values by itself."""
        return Packed.of(W, FORMATS[self.format], self.error_feedback)


@dataclass(frozen=True)
class CompressedLayer:
    """The state of a layer, with its fast weights packed."""

    W: Packed
    z: Tensor | None = None
    recent: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        others = (("z", self.z), ("recent", self.recent))
        return {**dict(self.W.tensors("W")), **{name: x for name, x in others if x is not None}}

    def restore(self, dtype: torch.dtype) -> FastWeightState:
        """Return the state that the layer continues from."""
        return FastWeightState(self.W.unpack(dtype), self.z, self.recent)


@dataclass(frozen=True)
class CompressedState:
    """What a language model carries on, with fast weights packed."""

    layers: list[CompressedLayer]
    position: Tensor
    compression: Compression

    def restore(self, dtype: torch.dtype) -> LanguageModelState:
        """Return the state that the model continues from, with fast weights in `dtype`."""
        return LanguageModelState([layer.restore(dtype) for layer in self.layers], self.position)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(x.nbytes for layer in self.layers for x in layer.tensors().values()) + self.position.nbytes
