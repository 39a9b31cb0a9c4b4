"""What a sweep shows while it runs: a live display on a terminal, a line for each finished cell elsewhere."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastweights.common.formatting import format_loss, format_seconds
from fastweights.experiments.engine.experiment import Cell, CellRecord, Experiment

_SHOWN = 6
# Without a terminal, seconds until the next line that says what a long cell is doing.
_SILENCE = 10.0


class Display:
    """Shows the sweeps of a command, whose experiments have `total` cells together.

    Large cells take longer and come first, so the time left of an experiment is estimated by size and not by number.
    """

    _experiment: Experiment

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.finished = console, total, 0
        self._work_left = self._work_done = 0
        self._start = self._said = time.monotonic()
        # The newest last.
        self._running: dict[str, str] = {}
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
        note = TextColumn("{task.fields[note]}")
        self._bars = Progress(*columns, note, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task("", total=total, note="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def begin(self, experiment: Experiment, known: Sequence[Cell], missing: Sequence[Cell]) -> None:
        self._experiment = experiment
        self._running.clear()
        self.finished += len(known)
        self._work_left, self._work_done = sum(cell.config["size"] for cell in missing), 0
        self._start = time.monotonic()
        models = len(known) + len(missing)
        kept = f", {len(known)} of them known" if known else ""
        self._say(f"{experiment.name}: {experiment.title}, {models} model{'s' if models != 1 else ''}{kept}")
        self._show()

    def step(self, cell: Cell, step: int, loss: float) -> None:
        if self.console.is_terminal:
            self._running.pop(cell.slug, None)
            self._running[cell.slug] = f"{self._name(cell.config)} {format_loss(loss)}"
            self._show()
        elif time.monotonic() - self._said >= _SILENCE:
            planned = f" of {cell.config['steps']}" if "steps" in cell.config else ""
            self._say(f"{self._place(cell.config)}: step {step}{planned}, loss {format_loss(loss)}")

    def done(self, record: CellRecord) -> None:
        self.finished += 1
        self._work_left -= record.config["size"]
        self._work_done += record.config["size"]
        self._running.pop(record.slug, None)
        place = f"[{self.finished}/{self.total}] {self._place(record.config)}, seed {record.config['seed']}"
        self._say(f"{place}: {_outcome(record.metrics)}{format_seconds(record.wall_s)}{self._left(', {} left')}")
        self._show()

    def _name(self, config: Mapping[str, Any]) -> str:
        """Name a model as its figure or table does."""
        return f"{self._experiment.models[config['model']]}, {self._experiment.size_name} = {config['size']}"

    def _place(self, config: Mapping[str, Any]) -> str:
        return f"{self._experiment.name}, {self._name(config)}"

    def _left(self, text: str) -> str:
        """Return the time left at the pace so far; nothing until there is a pace."""
        if not self._work_done or not self._work_left:
            return ""
        pace = (time.monotonic() - self._start) / self._work_done
        return text.format("about " + format_seconds(pace * self._work_left))

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        newest = list(self._running.values())[-_SHOWN:]
        note = "  ".join([self._left("{} left"), *newest]).strip()
        self._bars.update(self._task, completed=self.finished, description=self._experiment.name, note=note)


def _outcome(metrics: Mapping[str, Any]) -> str:
    """Return the result in the words of its task, followed by a comma."""
    if "diverged_at" in metrics:
        return f"diverged at step {metrics['diverged_at']}, "
    if "words_per_s" in metrics:
        return f"{metrics['words_per_s']:,.0f} words/s, "
    if "steps" not in metrics:
        return ""
    test = metrics.get("test") or {}
    for name, label in (("ppl", "perplexity"), ("bleu", "BLEU")):
        for split, value in (("test", test.get(name)), ("validation", metrics.get(f"last_{name}"))):
            if value is not None:
                return f"{split} {label} {value:.1f} after {metrics['steps']} steps, "
    return f"loss {format_loss(metrics.get('last_loss'))} after {metrics['steps']} steps, "
