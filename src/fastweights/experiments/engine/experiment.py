"""What an experiment is: cells to train, the paper's statement they test, claims on their results, and a plot.

A cell is one trained model, named by its whole configuration. An experiment lists its cells for each scale, knows how
to run a batch of them, and judges what came out. Nothing here knows the task: retrieval cells, language models and
translation models are all a `config` that leads to `metrics`, both of which JSON can hold.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fastweights.experiments.engine.departures import departures
from fastweights.experiments.engine.shape import Shape
from fastweights.training.engine.config import Fields

SCALES = {
    "smoke": "a few steps of each model, to see that everything runs; its numbers mean nothing",
    "small": "reduced sizes and training for a laptop",
    "code": "the paper's sizes by the protocol of its released code, where that differs from the text",
    "paper": "the paper's protocol",
}
FULL = ("code", "paper")
"""Scales with the paper's sizes."""

NOT_RUN = "not run"
BEYOND_SCALE = "not decided at this scale"
BUDGET = frozenset(("text", "steps", "d_model", "device"))
"""Departures from the paper after which a training has not its data or its budget."""


class BadInput(Exception):
    """Something the caller asked for cannot be done: shown as one paragraph, exit code 2."""


@dataclass(frozen=True)
class Cell:
    """One model to train. `config` has at least scale, model, rule, size and seed; equal configs are the same cell."""

    config: Mapping[str, Any]
    paper: Any = None

    @cached_property
    def slug(self) -> str:
        """Return a file name: readable at its beginning, with a hash of the whole configuration at its end."""
        text = json.dumps(self.config, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return "{model}-{size}-seed{seed}-{scale}".format(**self.config) + f"-{digest}"


@dataclass(frozen=True)
class CellOutcome:
    """The result of a cell, as JSON can hold it: NaN and infinities are None, losses have seven digits."""

    metrics: Mapping[str, Any]
    wall_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", storable(self.metrics))
        object.__setattr__(self, "wall_s", round(self.wall_s, 3))


def storable(value: Any) -> Any:
    """Return `value` with lists for tuples and None for numbers that JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: storable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(entry) for entry in value]
    return value


@dataclass(frozen=True, kw_only=True)
class CellRecord(CellOutcome):
    """A cell that has been run, and what it was run with."""

    config: Mapping[str, Any]
    paper: Any
    commit: str
    hardware: str
    versions: Mapping[str, str]

    @cached_property
    def slug(self) -> str:
        return Cell(self.config).slug


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, compared with our results.

    `holds` is None where results are missing, and where their scale or budget cannot decide the statement, whatever the
    numbers: `needs` then says what could.
    """

    text: str
    ours: str
    paper: str
    holds: bool | None
    needs: str = ""

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return NOT_RUN if self.ours == NOT_RUN else BEYOND_SCALE if self.needs else "undecided"
        return "holds" if self.holds else "fails"


class Results:
    """The records of one experiment at one scale, read by model and size. `loss` is the metric that counts."""

    def __init__(self, records: Sequence[CellRecord], loss: str = "best_loss") -> None:
        self.records = list(records)
        self.loss = loss

    def of(self, model: str, size: int | None = None) -> list[CellRecord]:
        return [r for r in self.records if r.config["model"] == model and size in (None, r.config["size"])]

    def sizes(self, *models: str) -> list[int]:
        """Return the sizes that all these models were run at, or any model when none is named."""
        if not models:
            return sorted({record.config["size"] for record in self.records})
        return sorted(set.intersection(*({record.config["size"] for record in self.of(model)} for model in models)))

    def values(self, model: str, size: int) -> list[float]:
        """Return the loss of each seed; NaN where it was not a number."""
        losses = (record.metrics.get(self.loss) for record in self.of(model, size))
        return [math.nan if loss is None else float(loss) for loss in losses]

    def mean(self, model: str, size: int) -> float:
        """Return the mean loss over the seeds, NaN if one of them is; only for cells that were run."""
        values = self.values(model, size)
        return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """The figure's form: its kind (one that the report can draw, or a function that draws it) and its axes.

    `compared` are two models whose difference in validation loss is drawn below the curves of kind "perplexity".
    """

    kind: str | Callable[[Any, Experiment, Results], None]
    x_label: str = ""
    y_label: str = ""
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    compared: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An experiment's size at one scale: one of `SCALES`, or a stand-in for the paper's data or budget.

    Args:
        sizes, seeds: the grid, with every model of the experiment.
        options: the rest of each cell's configuration.
        cost: what to expect, before it has been measured.
        note: how this departs from the paper, shown with the results.
        decides: whether results can decide the paper's statements, or the texts of those that they can. At scales
            `paper` and `code` they also need the paper's data and budget.
        label: what a stand-in is, in addition to its data and training.
    """

    sizes: tuple[int, ...]
    seeds: tuple[int, ...] = (1,)
    options: Mapping[str, Any] = field(default_factory=dict)
    cost: str
    note: str = ""
    decides: bool | Collection[str] = True
    label: str = ""


@dataclass(frozen=True)
class Selection:
    """The models, sizes and seeds that the command line asks for; None for those of the scale."""

    models: tuple[str, ...] | None = None
    sizes: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, with our numbers and the paper's, as the page and the terminal show them."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class UserInput:
    """What the command line gives besides the selection: folders of data, fields to change, the device."""

    data: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True)
class CellInputs:
    """What an experiment makes of a `UserInput`: entries for every cell's configuration, and the folder of the data."""

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None


Progress = Callable[[Cell, int, float], None]
Judge = Callable[[Results], list[Claim]]
CellOutcomes = Generator[tuple[Cell, CellOutcome], None, None]


@dataclass(frozen=True)
class Setup:
    """What cells are run with; nothing here changes what comes out.

    Args:
        jobs: cells at once; None for as many as suit the device.
        folder: for what an interrupted cell is resumed from.
        data: as in `CellInputs`.
        keep: leave the folders of finished cells, with their weights.
        force: begin every cell anew, also where an earlier command left a part of it.
    """

    device: str
    on_progress: Progress
    folder: Path
    jobs: int | None = None
    data: Path | None = None
    keep: bool = False
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of the paper.

    Args:
        name: of the folder of results, and for the command line.
        title, where, statement: for the page: where it is in the paper, and what the paper says it shows.
        models: name of each model in `config`, and its label in figures; one unnamed entry where there is no choice.
        configure: the whole configuration of the cell (scale name, model, size, seed; what is `given` by name).
        configure_as_paper: the same by the paper's protocol, where the experiment itself departs from it.
        paper: the paper's values for a configuration.
        run: runs cells and yields each with its outcome as it finishes.
        claims: judges the results.
        plot: how the results are drawn; None where the table says it all.
        table: the results in the form of the paper's table.
        make_inputs: makes the inputs of a scale from a `UserInput`; None for an experiment that has none.
        inputs: names of the entries of `config` that `make_inputs` decides. A record keeps its own.
        fields: what the settings of a `UserInput` can be and their types; None where there are none.
        needs: packages that its cells need besides PyTorch.
        formerly: names of experiments that have become stand-ins of this one; their results of scale `paper` are its
            results at the scale of that name.
        stored: shape of `config` and `metrics` that a stored cell needs to be shown.
        paper_corpus: what the paper's models were trained and scored on, where ours can be on something else.
        describe: the data and the training of a configuration that are not the paper's.
        decided_by: what it takes to decide statements that a smaller run cannot.
        long_enough: whether a training on other data than the paper's, or a shorter one, is long enough to decide them.
        measure: what the numbers are.
        size_name: what `size` is, in front of its value.
        fixed_sizes: drawn at the sizes of its scales only, which a `Selection` can narrow but not change.
        selectable: False for an experiment that is always run whole, whatever the `Selection`.
    """

    name: str
    title: str
    where: str
    statement: str
    models: Mapping[str, str]
    scales: Mapping[str, Scale]
    configure: Callable[..., Mapping[str, Any]]
    run: Callable[[Sequence[Cell], Setup], CellOutcomes]
    claims: Judge
    plot: Plot | None = None
    configure_as_paper: Callable[..., Mapping[str, Any]] | None = None
    paper: Callable[[Mapping[str, Any]], Any] = lambda config: None
    table: Callable[[Results], Table] | None = None
    make_inputs: Callable[[str, UserInput], CellInputs] | None = None
    inputs: tuple[str, ...] = ()
    fields: Fields | None = None
    needs: tuple[str, ...] = ()
    formerly: tuple[str, ...] = ()
    stored: Shape = field(default_factory=dict)
    paper_corpus: str = ""
    describe: Callable[[Mapping[str, Any]], str] = lambda config: ""
    decided_by: str = "scale paper"
    long_enough: Callable[[Mapping[str, Any]], bool] = lambda config: False
    measure: str = "Perplexities"
    size_name: str = "S"
    fixed_sizes: bool = False
    selectable: bool = True

    def judge(self, scale: str | None, results: Results) -> list[Claim]:
        """Return the claims; what the scale or the budget cannot decide is undecided, whatever the numbers say."""
        decides = self.scales[scale].decides if scale else True
        if scale in FULL and not self.is_full(results.records):
            decides = ()
        if results.records and all(self.long_enough(record.config) for record in results.records):
            decides = True
        judged = []
        for claim in self.claims(results):
            decided = decides if isinstance(decides, bool) else claim.text in decides
            judged.append(claim if decided else replace(claim, holds=None, needs=self.decided_by))
        return judged

    def is_full(self, records: Sequence[CellRecord]) -> bool:
        """Return whether results have the paper's data and budget."""
        if any(record.config["scale"] not in FULL for record in records):
            return False
        try:
            return not BUDGET & self.departures(records).keys()
        except (ValueError, KeyError):
            # An older configuration, which cannot be compared.
            return False

    def label(self, records: Sequence[CellRecord]) -> str:
        """Name results by their scale, or by their data and training where those are not the scale's own."""
        scale = records[0].config["scale"]
        at = self.scales[scale]
        if scale in SCALES and (scale not in FULL or self.is_full(records)):
            return scale
        return ", ".join(filter(None, (self.describe(records[0].config), at.label))) or scale

    def departures(self, records: Sequence[CellRecord]) -> dict[str, tuple[list[Any], list[Any]]]:
        """Return what differs from the paper's protocol in any of the cells: by name, their values and the paper's.

        Where the paper says nothing, its protocol is what the preset of its models has.
        """
        return departures(self._beside_paper(record.config) for record in records)

    def _beside_paper(self, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return a configuration and the paper's for the same model, each with the name of its text."""
        given = inputs_of(config, self.inputs)
        scale = config["scale"] if config["scale"] in FULL else "paper"
        unchanged = {**given, "set": {}} if "set" in given else given
        configure = self.configure_as_paper or self.configure
        theirs = configure(scale, config["model"], config["size"], config["seed"], **unchanged)
        if not self.paper_corpus:
            return config, theirs
        return {"text": given["corpus"]["name"], **config}, {"text": self.paper_corpus, **theirs}

    def grid(self, scale: str, selection: Selection | None = None) -> list[tuple[str, int, int]]:
        """Return model, size and seed of each cell; none at a scale that the experiment does not have."""
        if scale not in self.scales:
            return []
        at = self.scales[scale]
        chosen = selection if selection and self.selectable else Selection()
        models = [model for model in self.models if chosen.models is None or model in chosen.models]
        sizes = at.sizes if chosen.sizes is None else chosen.sizes
        if self.fixed_sizes:
            sizes = tuple(size for size in sizes if size in at.sizes)
        seeds = at.seeds if chosen.seeds is None else chosen.seeds
        return [(model, size, seed) for seed in seeds for size in sizes for model in models]

    def inputs_for(self, scale: str, request: UserInput) -> CellInputs:
        """Return the inputs of a scale; BadInput or ValueError for what the experiment cannot work with."""
        return self.make_inputs(scale, request) if self.make_inputs else CellInputs()

    def cell(self, scale: str, model: str, size: int, seed: int, given: Mapping[str, Any] | None = None) -> Cell:
        config = self.configure(scale, model, size, seed, **(given or {}))
        return Cell(config, self.paper(config))

    def cells(
        self, scale: str, selection: Selection | None = None, given: Mapping[str, Any] | None = None
    ) -> list[Cell]:
        return [self.cell(scale, *place, given) for place in self.grid(scale, selection)]

    def cell_of(self, record: CellRecord) -> Cell | None:
        """Return the cell of a record, None if that is of another experiment or of an older configuration."""
        config = record.config
        if config["model"] not in self.models or config["scale"] not in self.scales:
            return None
        if self.fixed_sizes and config["size"] not in self.scales[config["scale"]].sizes:
            return None
        if not set(self.inputs) <= config.keys():
            return None
        place = (config["scale"], config["model"], config["size"], config["seed"])
        try:
            cell = self.cell(*place, inputs_of(config, self.inputs))
        except (ValueError, TypeError, KeyError, AttributeError):
            # Settings that this version refuses, or entries that were changed by hand.
            return None
        return cell if cell.slug == record.slug else None


def inputs_of(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the entries with those names."""
    return {name: config[name] for name in names}
