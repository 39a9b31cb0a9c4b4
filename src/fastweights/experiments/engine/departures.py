"""In what a cell at scale paper or code departs from the paper's protocol: by its experiment, its text or --set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastweights.experiments.engine.experiment import CellRecord, Experiment, inputs_of

_SAID_ELSEWHERE = ("size", "corpus", "set")
"""Entries of a configuration that other entries say in full."""

DEFAULT = "default"
"""Stands for the value of an entry that a configuration has only where it is not the default."""

Place = tuple[str, ...]


def departures(experiment: Experiment, records: Sequence[CellRecord]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return what differs from the paper's protocol in any of the cells: by name, their values and the paper's.

    What the paper does not say is in its protocol as the preset of its models has it.
    """
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for record in records:
        for name, pair in _departures(experiment, record).items():
            for values, value in zip(found.setdefault(name, ([], [])), pair, strict=True):
                if value not in values:
                    values.append(value)
    return found


def _departures(experiment: Experiment, record: CellRecord) -> dict[str, tuple[Any, Any]]:
    config, given = record.config, inputs_of(record.config, experiment.inputs)
    place = (config["scale"], config["model"], config["size"], config["seed"])
    unchanged = {**given, "set": {}} if "set" in given else given
    theirs = dict(_leaves((experiment.configure_as_paper or experiment.configure)(*place, **unchanged)))
    found: dict[str, tuple[Any, Any]] = {}
    if experiment.paper_corpus and "corpus" in given:
        found["text"] = (given["corpus"]["name"], experiment.paper_corpus)
    for path, value in _leaves(config):
        if path[0] not in _SAID_ELSEWHERE:
            found[path[-1]] = (value, theirs.get(path, DEFAULT))
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def _leaves(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the entries of a configuration that hold no further ones, with the path to each."""
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        value = {str(number): entry for number, entry in enumerate(value)}
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, entry in value.items():
        yield from _leaves(entry, (*path, name))
