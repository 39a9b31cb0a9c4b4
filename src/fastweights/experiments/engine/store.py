"""Results on disk: one file for each cell, written whole or not at all, and one `results.json` for each experiment.

    OUT/NAME/cells/SLUG.json    a cell, written as soon as it is trained
    OUT/NAME/results.json       every cell of one scale, assembled from them
    OUT/corpora.json            what the corpora of older cells, by fingerprint, are scored on: `keep_corpus`

A cell counts as known when its file, or an entry of a `results.json`, has its configuration, under any experiment: what
was trained for one figure is not trained again for another. Cells of other scales, and of other data where an
experiment takes them, stay beside those in `results.json`.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.common.files import write_atomically
from fastweights.data.manifest import DataError, fingerprint, finished, layout, read_manifest, sets
from fastweights.experiments.engine.experiment import FULL, SCALES, BadInput, CellRecord, Experiment, inputs_of
from fastweights.experiments.engine.register import EXPERIMENTS, known_scales
from fastweights.experiments.engine.shape import Shape, mismatch

FORMAT = 1
_REMEDY = "nothing was changed; move it away or choose another folder with --out"
_BROKEN = (ValueError, KeyError, TypeError, OSError)
"""What reading a file raises that was cut short or changed by hand."""

_ENTRY: Shape = {
    "config": {"scale": str, "model": str, "size": int, "seed": int},
    "metrics": {},
    "wall_s": float,
    "commit": str,
    "hardware": str,
    "versions": {},
}


class Assembled(NamedTuple):
    """A `results.json`; `unreadable` are its entries that are no cells, each with the reason."""

    scale: str
    records: list[CellRecord]
    inputs: dict[str, Any]
    unreadable: list[str]


class Store:
    """The folder OUT; `warn` is called with a message about each file that is ignored."""

    def __init__(self, out: Path, warn: Callable[[str], None] = lambda message: None) -> None:
        self.out = out
        self.warn = warn
        self._warned: set[str] = set()

    def folder(self, name: str) -> Path:
        return self.out / name

    def check_writable(self) -> None:
        probe = self.out / f".writable.{os.getpid()}.tmp"
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BadInput(f"cannot write to {self.out}: {error.strerror}; choose another folder with --out") from None

    def assembled(self, name: str) -> Assembled:
        """Read `results.json`, which is empty where there is none; BadInput when it is broken or of another version."""
        path = self.folder(name) / "results.json"
        if not path.exists():
            return Assembled("", [], {}, [])
        try:
            content = _read(path)
            if content["experiment"] != name:
                raise ValueError(f"it holds {content['experiment']!r}, not {name!r}")
            scale, entries = content["scale"], list(content["cells"])
        except _BROKEN as error:
            raise BadInput(f"{path} is cut short or not a results file ({_reason(error)}); {_REMEDY}") from None
        records, unreadable = [], []
        for number, entry in enumerate(entries, 1):
            try:
                records.append(_record(entry))
            except _BROKEN as error:
                unreadable.append(f"{path} is not a results file (cell {number}: {_reason(error)}); {_REMEDY}")
        for message in unreadable:
            self._warn_once(message)
        if not isinstance(scale, str) or scale not in known_scales():
            self._warn_once(f"{path} has the unknown scale {scale!r}; known are {', '.join(known_scales())}")
            scale = next((record.config["scale"] for record in records), "")
        return Assembled(scale, records, content.get("given", {}), unreadable)

    def known(self, name: str) -> dict[str, CellRecord]:
        """Return every readable cell stored under `name` or what it was `formerly`, of any scale, by slug."""
        former = EXPERIMENTS[name].formerly if name in EXPERIMENTS else ()
        moved = (_moved(record, stand_in) for stand_in in former for record in self._cells(stand_in).values())
        return {record.slug: record for record in moved} | self._cells(name)

    def _cells(self, name: str) -> dict[str, CellRecord]:
        records = {record.slug: record for record in self.assembled(name).records}
        for path in sorted((self.folder(name) / "cells").glob("[!.]*.json")):
            record = self._read_cell(path)
            if record is not None:
                records[record.slug] = record
        return records

    def known_anywhere(self) -> dict[str, CellRecord]:
        names = sorted(path.name for path in self.out.glob("*") if path.is_dir())
        return {slug: record for name in names for slug, record in self.known(name).items()}

    def of(self, experiment: Experiment, scale: str, given: Mapping[str, Any] | None = None) -> list[CellRecord]:
        """Return the experiment's cells of that scale with those inputs, or the first of its `groups`."""
        groups = self.groups(experiment, scale)
        if given is not None:
            groups = [group for group in groups if _given(group[0], experiment) == _key(given)]
        return groups[0] if groups else []

    def groups(self, experiment: Experiment, scale: str) -> list[list[CellRecord]]:
        """Return the experiment's cells of that scale in the order of its grid, a group for each choice of inputs.

        The first is the one of `results.json` where that is of this scale, then those with the most cells.
        """
        found: dict[str, list[CellRecord]] = {}
        corpora = self.corpora()
        for record in self.known(experiment.name).values():
            cell = experiment.cell_of(record) if record.config["scale"] == scale else None
            if cell is not None and self.is_complete(experiment, record):
                record = _completed(record, cell.paper, corpora)
                found.setdefault(_given(record, experiment), []).append(record)
        assembled = self.assembled(experiment.name)
        shown = _key(assembled.inputs) if assembled.scale == scale else None
        models = list(experiment.models)
        order = lambda r: (models.index(r.config["model"]), r.config["size"], r.config["seed"])  # noqa: E731
        ranked = sorted(found, key=lambda given: (given != shown, -len(found[given])))
        return [sorted(found[given], key=order) for given in ranked]

    def others(self, experiment: Experiment, scale: str) -> list[list[CellRecord]]:
        """Return what else there is where `scale` is shown: other inputs, full scales and stand-ins."""
        hidden = (scale, "small", "smoke")
        scales = [name for name in _largest_first() if name in experiment.scales and name not in hidden]
        return self.groups(experiment, scale)[1:] + [
            group for name in scales for group in self.groups(experiment, name)
        ]

    def corpora(self) -> dict[str, Any]:
        """Read the corpora that are known by their fingerprints; BadInput when the file is broken."""
        path = self.out / "corpora.json"
        try:
            found: dict[str, Any] = _load(path) if path.exists() else {}
            _ = [corpus["sets"].items() for corpus in found.values()]
        except (*_BROKEN, AttributeError) as error:
            raise BadInput(f"{path} is not a list of corpora ({_reason(error)}); move it away") from None
        return found

    def keep_corpus(self, folder: Path) -> None:
        """Record which sets the corpus in `folder` is scored on, for cells trained on it that do not say so."""
        manifest = read_manifest(folder)
        manifest = finished(folder, layout(manifest) if manifest else "stream", verify=True)
        if not sets(manifest):
            raise DataError(f"{folder} does not name its validation and test set; prepare it again with --force")
        mark, records = fingerprint(manifest), self.known_anywhere().values()
        if all(record.config.get("corpus", {}).get("fingerprint") != mark for record in records):
            raise BadInput(f"no result in {self.out} was made with the corpus in {folder} ({manifest['name']}, {mark})")
        found = self.corpora() | {mark: {"name": manifest["name"], "sets": sets(manifest)}}
        write_atomically(self.out / "corpora.json", (json.dumps(found, indent=1, sort_keys=True) + "\n").encode())

    def current(self, experiment: Experiment) -> tuple[str | None, list[CellRecord]]:
        """Return the scale and the records to show: the experiment's cells, or else those of an old `results.json`."""
        name = experiment.name
        scale = self.scale(name)
        if scale is None or scale not in experiment.scales:
            return None, []
        records = self.of(experiment, scale)
        if not records:
            records = [
                record
                for record in self.assembled(name).records
                if record.config["model"] in experiment.models and self.is_complete(experiment, record)
            ]
            if records:
                self.warn(
                    f"the results of {name} are of an older configuration; `reproduce` would train its models again"
                )
        return (scale if records else None), records

    def is_complete(self, experiment: Experiment, record: CellRecord) -> bool:
        """Return whether a record holds what the experiment shows; warn of one that does not."""
        problem = mismatch({"config": record.config, "metrics": record.metrics}, experiment.stored)
        if problem:
            path = self.folder(experiment.name) / "cells" / f"{record.slug}.json"
            path = path if path.exists() else self.folder(experiment.name) / "results.json"
            self._warn_once(f"{path}: {record.slug} is left out and counts as not run ({problem})")
        return problem is None

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self.warn(message)

    def _read_cell(self, path: Path) -> CellRecord | None:
        try:
            record = _record(_read(path))
            if record.slug != path.stem:
                raise ValueError("its configuration does not match its name")
        except _BROKEN as error:
            self._warn_once(f"{path} is broken ({_reason(error)}) and counts as not run")
            return None
        return record

    def clear_temporaries(self, name: str) -> None:
        """Remove what a killed run left in the middle of a write."""
        for folder in (self.folder(name), self.folder(name) / "cells"):
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def save(self, name: str, record: CellRecord) -> None:
        """Store the cell under `name`, and replace older results of it under other experiments."""
        own = self.folder(name) / "cells" / f"{record.slug}.json"
        for path in dict.fromkeys([own, *self.out.glob(f"*/cells/{record.slug}.json")]):
            write_atomically(path, _content(record))

    def rescue(self, record: CellRecord) -> Path | None:
        """Write a cell that OUT has no space for to a new folder elsewhere; None if that fails everywhere."""
        for place in (tempfile.gettempdir(), str(Path.home()), "/dev/shm"):
            with suppress(OSError):
                path = Path(tempfile.mkdtemp(prefix="fastweights-cell-", dir=place)) / f"{record.slug}.json"
                write_atomically(path, _content(record))
                return path
        return None

    def scale(self, name: str) -> str | None:
        """Return the scale that `results.json` holds, or else the largest that has cells."""
        if scale := self.assembled(name).scale:
            return scale
        present = {record.config["scale"] for record in self.known(name).values()}
        return next((scale for scale in _largest_first() if scale in present), None)

    def assemble(self, experiment: Experiment, scale: str, given: Mapping[str, Any] | None = None) -> None:
        """Write `results.json` from the experiment's cells of that scale and with what was given, if there are any."""
        name, path = experiment.name, self.folder(experiment.name) / "results.json"
        records, before = self.of(experiment, scale, given), self.assembled(name)
        if not records or before.unreadable:
            return
        for record in before.records:
            # A results file may have come without its cell files; another scale must not push its cells out.
            if not (self.folder(name) / "cells" / f"{record.slug}.json").exists():
                self.save(name, record)
        content = assembly(experiment, scale, records).encode()
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)


def assembly(experiment: Experiment, scale: str, records: Sequence[CellRecord]) -> str:
    """Return the text of `results.json`, a line for each cell; at its top, the run that most cells come from."""
    runs = Counter((r.commit, r.hardware, json.dumps(r.versions, sort_keys=True)) for r in records)
    commit, hardware, versions = runs.most_common(1)[0][0] if runs else ("", "", "{}")
    head: dict[str, Any] = {"format": FORMAT, "experiment": experiment.name, "scale": scale}
    if experiment.inputs:
        head["given"] = inputs_of(records[0].config, experiment.inputs) if records else {}
    head |= {"commit": commit, "hardware": hardware, "versions": json.loads(versions)}
    lines = [f" {_dump(key)}: {_dump(value)}," for key, value in head.items()]
    cells = ",\n  ".join(_dump(_entry(record)) for record in records)
    return "{\n" + "\n".join(lines) + '\n "cells": [\n  ' + cells + "\n ]\n}\n"


def _largest_first() -> list[str]:
    """Return the scales in the order in which results are worth showing: full ones, stand-ins, then reduced ones."""
    stand_ins = [scale for scale in known_scales() if scale not in SCALES]
    return [*reversed(FULL), *stand_ins, *(scale for scale in reversed(SCALES) if scale not in FULL)]


def _entry(record: CellRecord) -> dict[str, Any]:
    fields = ("config", "metrics", "paper", "wall_s", "commit", "hardware", "versions")
    return {name: getattr(record, name) for name in fields}


def _record(entry: Any) -> CellRecord:
    problem = mismatch(entry, _ENTRY)
    if problem:
        raise ValueError(problem)
    if entry["config"]["scale"] not in known_scales():
        raise ValueError(f"unknown scale {entry['config']['scale']!r}; known are {', '.join(known_scales())}")
    record = CellRecord(paper=entry.get("paper"), **{name: entry[name] for name in _ENTRY})
    if Path(record.slug).name != record.slug:
        raise ValueError(f"'config.model' is {record.config['model']!r}, which cannot be part of a file name")
    return record


def _completed(record: CellRecord, paper: Any, corpora: Mapping[str, Any]) -> CellRecord:
    """Return the record with the paper's current values, and with what it was scored on if only the corpus says it."""
    corpus = corpora.get(record.config.get("corpus", {}).get("fingerprint"))
    told = {"sets": corpus["sets"]} if corpus and not record.metrics.get("sets") else {}
    return replace(record, paper=paper, metrics={**record.metrics, **told})


def _moved(record: CellRecord, stand_in: str) -> CellRecord:
    """Return a cell of an experiment that has become a stand-in of others: its scale `paper` is the stand-in."""
    return replace(record, config={**record.config, "scale": stand_in}) if record.config["scale"] == "paper" else record


def _content(record: CellRecord) -> bytes:
    return _dump({"format": FORMAT, **_entry(record)}).encode()


def _read(path: Path) -> Any:
    """Read a file of results, or raise a BadInput where it is of another version."""
    content = _load(path)
    if content["format"] != FORMAT:
        found = f"{path} has format {content['format']!r}, this version reads format {FORMAT}"
        raise BadInput(f"{found}; {_REMEDY}")
    return content


def _load(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _given(record: CellRecord, experiment: Experiment) -> str:
    return _key(inputs_of(record.config, experiment.inputs))


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
