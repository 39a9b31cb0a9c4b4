"""Look a name up in a table or check a value, and say what would have worked where it is wrong."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

Entry = TypeVar("Entry")


def look_up(table: Mapping[str, Entry], name: object, what: str) -> Entry:
    """Return the entry of `table` called `name`, or raise a ValueError with all names and the nearest."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a name, got {type(name).__name__}; known names: {', '.join(table)}")
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {name!r}{hint} (known: {', '.join(table)})")


def check_name(names: Iterable[str], name: object, what: str) -> None:
    """Raise the errors of `look_up` unless `name` is one of `names`."""
    look_up(dict.fromkeys(names), name, what)


def at_least_one(**values: object) -> None:
    """Raise a ValueError for the first of these that is not a whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_types(values: Any, types: Mapping[str, type]) -> None:
    """Raise a KeyError or TypeError where one of the entries is missing or of another type."""
    for name, expected in types.items():
        if type(values[name]) is not expected:
            raise TypeError(f"{name} is {values[name]!r} and not of type {expected.__name__}")
