"""How cells depart from the paper's protocol: by their experiment, their text or --set."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SAID_ELSEWHERE = ("scale", "size", "corpus", "set")
"""Entries of a configuration that other entries say in full."""

DEFAULT = "default"
"""Stands for the value of an entry that a configuration has only where it is not the default."""

Config = Mapping[str, Any]


def departures(pairs: Iterable[tuple[Config, Config]]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return what differs in any pair of a configuration and the paper's: by name, our values and the paper's."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for config, paper in pairs:
        theirs = dict(_leaves(paper))
        for path, value in _leaves(config):
            if path[0] in _SAID_ELSEWHERE or value == theirs.get(path, DEFAULT):
                continue
            for values, entry in zip(
                found.setdefault(path[-1], ([], [])), (value, theirs.get(path, DEFAULT)), strict=True
            ):
                if entry not in values:
                    values.append(entry)
    return found


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the entries of a configuration that hold no further ones, with the path to each."""
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        value = {str(number): entry for number, entry in enumerate(value)}
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, entry in value.items():
        yield from _leaves(entry, (*path, name))
