"""Look a name up in a table, and say what would have worked when it is not there."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

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
