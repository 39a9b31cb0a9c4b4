"""What the configurations of models share: checks of their fields, and the way to JSON and back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fastweights.common.tables import at_least_one, check_name
from fastweights.layers.checks import check_dropout


def check_numbers(tokens: Tensor, vocab_size: int, name: str, unit: str) -> None:
    """Refuse tokens that are not int64 numbers from 0 to vocab_size - 1."""
    if tokens.dtype != torch.int64:
        raise TypeError(f"{name} must be int64 {unit} numbers, got {tokens.dtype}")
    # Where looking is free: on other devices it would wait for the queue.
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            span = f"from 0 to vocab_size - 1 = {vocab_size - 1}"
            raise ValueError(f"{name} must be {unit}s {span}, got {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A frozen dataclass of a model's fields.

    Attributes:
        vocab_size: number of words or sub-words.
    """

    vocab_size: int
    # Fields that were added to stored configurations: at their default they are not stored, so that those stay equal.
    ADDED: ClassVar[tuple[str, ...]] = ()

    def check_fields(self, sizes: Sequence[str], dropouts: Sequence[str], choices: Mapping[str, Iterable[str]]) -> None:
        """Refuse sizes below 1, dropouts that are no shares, and names that are none of the choices."""
        at_least_one(**{name: getattr(self, name) for name in ("vocab_size", *sizes)})
        for name, known in choices.items():
            check_name(known, getattr(self, name), name)
        for name in dropouts:
            try:
                check_dropout(getattr(self, name))
            except (ValueError, TypeError) as error:
                raise type(error)(f"{name}: {error}") from None

    @classmethod
    def check_names(cls, values: Iterable[str]) -> None:
        """Refuse names that are no fields, with the nearest that is one."""
        for name in values:
            check_name([f.name for f in fields(cls)], name, f"field of {cls.__name__}")

    def to_dict(self) -> dict[str, Any]:
        """Return every field, ready for JSON."""
        values = asdict(self)
        for added in fields(self):
            if added.name in self.ADDED and values[added.name] == added.default:
                del values[added.name]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make the configuration that `to_dict` described; fields left out take their default."""
        cls.check_names(values)
        if "vocab_size" not in values:
            raise ValueError(f"vocab_size is missing; got {', '.join(values) or 'nothing'}")
        return cls(**values)
