"""What stored results have to look like, so that a file that was edited by hand is refused before it is shown."""

from collections.abc import Mapping
from types import FunctionType
from typing import Any, get_args

Shape = Any
"""A type or a union of types; a list of one shape for a list of such entries; a tuple of shapes for a list of that
length; a mapping from names to shapes, where a name that ends in "?" may be missing; or a function from the value to
its shape. A float may be whole."""

CURVE: Shape = [(int, float | None)]
"""Steps, each with a loss or another score; None where it was not a number."""


def mismatch(value: Any, shape: Shape, name: str = "") -> str | None:
    """Return what is wrong with a value read from JSON, or None if it has the shape."""
    if isinstance(shape, FunctionType):
        shape = shape(value)
    if isinstance(shape, Mapping):
        return _mismatch_of_object(value, shape, name)
    if isinstance(shape, (list, tuple)):
        if not isinstance(value, list):
            return _wrong(value, "a list", name)
        if isinstance(shape, tuple) and len(value) != len(shape):
            return f"{name!r} has {len(value)} entries in place of {len(shape)}"
        shapes = shape if isinstance(shape, tuple) else shape * len(value)
        problems = (mismatch(entry, inner, name) for entry, inner in zip(value, shapes, strict=True))
        return next((problem for problem in problems if problem), None)
    allowed = shape | int if float in (shape, *get_args(shape)) else shape
    if isinstance(value, allowed) and not isinstance(value, bool):
        return None
    return _wrong(value, getattr(shape, "__name__", str(shape)), name)


def _mismatch_of_object(value: Any, shape: Mapping[str, Shape], name: str) -> str | None:
    if not isinstance(value, Mapping):
        return _wrong(value, "an object", name)
    for entry, inner in shape.items():
        key = entry.removesuffix("?")
        if key not in value and key == entry:
            return f"no {key!r}" + (f" in {name!r}" if name else "")
        problem = mismatch(value[key], inner, f"{name}.{key}" if name else key) if key in value else None
        if problem:
            return problem
    return None


def _wrong(value: Any, expected: str, name: str) -> str:
    shown = repr(value) if len(repr(value)) < 40 else f"a {type(value).__name__}"
    return f"{name!r} is {shown}, not {expected}" if name else f"it is {shown}, not {expected}"
