"""Tensors inside nested values: batches and carried states."""

import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_KIND = "__kind__"


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the same nest of dataclasses, tuples, lists and dicts with `function` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: map_tensors(function, getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, tuple):
        mapped = [map_tensors(function, item) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else tuple(mapped)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nest, in the order of `map_tensors`."""
    tensors: list[Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return tensors


def signature(value: Any) -> Any:
    """Return all but the numbers in the tensors, hashable: nests of equal signature take the same path through code."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(signature(getattr(value, f.name)) for f in fields(value) if f.init)
    if isinstance(value, dict):
        return dict, *((key, signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *(signature(item) for item in value)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """Return the same with every tensor on `device`, copied without waiting where the memory allows it."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)


def pack(value: Any) -> Any:
    """Return the same in plain containers with tensors on the CPU, which `torch.load(weights_only=True)` reads back."""
    if isinstance(value, Tensor):
        # A clone, because saving a view would write all of the memory that it looks into.
        return value.detach().to("cpu", copy=True)
    names = getattr(value, "_fields", None)
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.init]
    if names is not None:
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        return {_KIND: kind, "fields": {name: pack(getattr(value, name)) for name in names}}
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(pack(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"cannot save a {type(value).__name__} in a checkpoint; a carried value may be made of tensors, dataclasses, "
        "named tuples, lists, tuples, dicts, numbers and strings"
    )


def unpack(value: Any, device: torch.device) -> Any:
    """Return what `pack` made, as it was, with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        if _KIND in value:
            return _record(value[_KIND])(**{name: unpack(item, device) for name, item in value["fields"].items()})
        return {key: unpack(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(unpack(item, device) for item in value)
    return value


def _record(kind: str) -> Callable[..., Any]:
    module, _, name = kind.partition(":")
    named: Any = importlib.import_module(module)
    for part in name.split("."):
        named = getattr(named, part)
    # A checkpoint names classes; nothing but a plain record may be called on its word.
    if not (isinstance(named, type) and (is_dataclass(named) or hasattr(named, "_fields"))):
        raise ValueError(f"the checkpoint asks for {kind}, which is neither a dataclass nor a named tuple")
    return named
