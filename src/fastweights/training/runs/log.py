"""The log of a run: JSON lines always, the console, TensorBoard and W&B where they are."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastweights.common.files import write_atomically
from fastweights.training.engine.config import TrainingConfig

# Without a terminal, seconds until the first line, and at most between lines.
FIRST_LINE_S, SILENCE_S = 3.0, 60.0


class Sink(Protocol):
    """Takes records with a "kind" ("train", "valid" or "event") and a "step"."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line. A run that resumes at `step` drops the measurements after it, to make them anew.

    Lines that are no records do not stop it: the log is kept aside as it was, and `warn` is told.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], None] = lambda message: None) -> None:
        self.path = path
        if path.exists():
            records, broken = _parse(path)
            if broken:
                aside = path.with_name(path.name + ".damaged")
                path.replace(aside)
                shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
                warn(f"{path} has lines that are no records ({shown}); it is kept as {aside.name}, the rest is used")
            kept = (json.dumps(r) + "\n" for r in records if r["kind"] == "event" or r["step"] <= step)
            write_atomically(path, "".join(kept).encode())
        self._file = path.open("a")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({key: _plain(value) for key, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_log(path: Path | str) -> list[dict[str, Any]]:
    """Return the records of a log; lines that are none, such as a last one that was cut short, are left out."""
    return _parse(Path(path))[0]


def _parse(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the records, and the numbers of the complete lines that are none."""
    records, broken = [], []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
            if not (isinstance(record["kind"], str) and type(record["step"]) is int):
                raise TypeError("not a record")
            records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            # A kill can cut the last line short.
            if line.endswith(b"\n"):
                broken.append(number)
    return records, broken


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Scalars as `kind/name`."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, continued when training resumes."""

    def __init__(self, project: str, out: Path, configuration: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ImportError("wandb was asked for and is not installed; pip install wandb, or leave it out") from None
        identity = out / "wandb.txt"
        if not identity.exists():
            write_atomically(identity, wandb.util.generate_id().encode())
        self._run = wandb.init(
            project=project, id=identity.read_text(), resume="allow", dir=str(out), config=configuration
        )

    def write(self, record: Mapping[str, Any]) -> None:
        scalars = _scalars(record)
        if scalars:
            self._run.log(scalars, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    if record["kind"] == "event":
        return {}
    numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, (int, float))}
    return {f"{record['kind']}/{name}": value for name, value in numbers.items()}


class Terminal:
    """A bar on a terminal; elsewhere a line for each record, and for a step when there was none for a while."""

    def __init__(self, console: Console, steps: int, step: int) -> None:
        self.console = console
        self.steps = steps
        self._due = time.monotonic() + FIRST_LINE_S
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)
        self._bar.start()
        self._task = self._bar.add_task("training", total=steps, completed=step)

    def write(self, record: Mapping[str, Any]) -> None:
        if record["kind"] != "event":
            self.say(self._line(record))

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)
        if not self.console.is_terminal and time.monotonic() >= self._due:
            self.say(f"step {step}/{self.steps}")

    def say(self, text: str) -> None:
        self._due = time.monotonic() + SILENCE_S
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()

    def _line(self, record: Mapping[str, Any]) -> str:
        place = f"step {record['step']}/{self.steps}"
        if record["kind"] == "valid":
            shown = {k: v for k, v in record.items() if k not in ("kind", "step", "wall_s", "best")}
            best = " (best so far)" if record.get("best") else ""
            # BLEU is a number up to 100, of which two decimals are enough.
            scores = (f"{k} {v:.2f}" if k == "bleu" else f"{k} {v:.5g}" for k, v in shown.items())
            return f"{place}  validation  {'  '.join(scores)}{best}"
        return (
            f"{place}  loss {record['loss']:.4f}  lr {record['lr']:.3g}  grad norm {record['grad_norm']:.3g}  "
            f"{record['tokens_per_s']:,.0f} tokens/s  {record['memory_bytes'] / 2**30:.2f} GiB"
        )


class RunLog:
    """All sinks of the first process; the other processes have none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.terminal: Terminal | None = None
        self._sinks: list[Sink] = []
        self._failed: set[str] = set()

    def open(
        self, out: Path, config: TrainingConfig, task: dict[str, Any], step: int, watch: Sink | None = None
    ) -> None:
        """Start writing, for a run that has made `step` updates; to `watch` too."""
        self._sinks.append(JsonLines(out / "log.jsonl", step, self.warn))
        self._sinks += [] if watch is None else [watch]
        if config.tensorboard and find_spec("tensorboard") is not None:
            self._sinks.append(TensorBoard(out / "tensorboard", step))
        if config.wandb is not None:
            self._sinks.append(WandB(config.wandb, out, {"task": task, "training": config.describe()}))
        self.terminal = Terminal(self.console, config.steps, step)
        self._sinks.append(self.terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for sink in self._sinks:
            sink.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write a record to every sink. One that fails, as on a full disk, is named once and does not stop training."""
        record = {"kind": kind, "step": step, **values}
        for sink in self._sinks:
            try:
                sink.write(record)
            except OSError as error:
                name = type(sink).__name__
                if name not in self._failed:
                    self._failed.add(name)
                    self.warn(f"{name} cannot be written ({error.strerror}); training continues, the log has gaps")

    def advance(self, step: int) -> None:
        if self.terminal is not None:
            self.terminal.advance(step)

    def say(self, text: str) -> None:
        if self.terminal is not None:
            self.terminal.say(text)

    def warn(self, text: str) -> None:
        """Print a warning on the console, also before `open`."""
        self.console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True, style="bold red")


def memory_in_use(device: torch.device) -> int:
    """Return the most bytes held so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
