"""Two ways to run cells: `measured`, one after the other, and `runner`, by the training loop.

    run = runner(build, score)

Each training has a folder of its own, from which an interrupted one is resumed. What is to be learned and how it is
scored is the experiment's; here are the folder, the processes, and the metrics that every run has: `curve` and
`training_curve` ([[step, value], ...]), of the validations `best_loss` and `last_loss`, or `best_bleu` and `last_bleu`
where that is the task's score, `steps`, `tokens`, `tokens_per_s` and `memory_bytes`. A training that diverges is a
result too: `diverged_at`.
"""

import ctypes
import gc
import json
import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastweights.common import provenance
from fastweights.common.files import write_atomically
from fastweights.common.processes import in_processes
from fastweights.experiments.engine.experiment import (
    BadInput,
    Cell,
    CellOutcome,
    CellOutcomes,
    Experiment,
    Setup,
    storable,
)
from fastweights.experiments.engine.shape import CURVE, Shape
from fastweights.training.engine.config import Fields, TrainingConfig
from fastweights.training.engine.diagnosis import Diverged
from fastweights.training.engine.loop import train
from fastweights.training.engine.task import Score, Task
from fastweights.training.runs.checkpoint import CheckpointError
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.log import read_log
from fastweights.training.runs.signals import Interrupted

CellConfig = Mapping[str, Any]
Report = Callable[[int, float], None]
Measure = Callable[[CellConfig], Mapping[str, Any]]
Build = Callable[[CellConfig, Path | None], tuple[Task, TrainingConfig]]
Work = Callable[[tuple[CellConfig, Path], Report], tuple[dict[str, Any], float]]
ScoreRun = Callable[[CellConfig, Path, Path | None, str], Mapping[str, Any]]
OWN_OPTIONS = {"seed": "--seeds", **dict.fromkeys(("accelerator", "devices", "nodes", "strategy"), "--device")}
"""Fields of every training that are not for --set, and the option that decides each."""

POINTS = 250
"""The most points of a training curve that are kept."""


def measured(measure: Measure, **rest: Any) -> Experiment:
    """Return an experiment whose cells are measured one after the other, without training or anything to select."""

    def run(cells: Sequence[Cell], setup: Setup) -> CellOutcomes:
        return measure_each(cells, measure)

    return Experiment(run=run, fixed_sizes=True, selectable=False, **rest)


def measure_each(cells: Sequence[Cell], measure: Measure) -> CellOutcomes:
    """Measure cells by their configurations, and yield each with its outcome."""
    for cell in cells:
        start = time.perf_counter()
        yield cell, CellOutcome(measure(cell.config), time.perf_counter() - start)


def stored(corpus: Mapping[str, Shape], scores: Mapping[str, Shape]) -> Shape:
    """Return the shape of a stored cell: what it says of its corpus, and its metrics unless the training diverged."""
    config = {"corpus": {"name": str, "fingerprint": str, **corpus}, "set": {}, "steps": int}
    every = {"curve": CURVE, "diverged_at?": int, "parameters?": int, "sets?": {"valid?": str, "test?": str}}
    return {"config": config, "metrics": lambda metrics: every if "diverged_at" in metrics else {**every, **scores}}


def runner(build: Build, score: ScoreRun) -> Callable[[Sequence[Cell], Setup], CellOutcomes]:
    """Return the `Experiment.run` of such cells.

    On a CPU as many cells as there are cores are trained at once, with a thread each, which for small models does more
    than all threads on one; on a GPU one at a time.

    Args:
        build: returns what to train for a configuration, with the data in that folder.
        score: returns the metrics of the run in a folder once it is trained (configuration, run, data, device). Both
            are functions of a module, so that other processes find them.
    """

    def run(cells: Sequence[Cell], setup: Setup) -> CellOutcomes:
        jobs = min(len(cells), setup.jobs or (1 if setup.device.startswith("cuda") else provenance.cores()))
        work: Work = partial(train_cell, build, score, setup.data, setup.device)
        if jobs > 1:
            work = partial(_in_a_process, work)
        tasks = ((cell.config, _folder(cell, setup)) for cell in cells)

        def report(number: int, step: int, loss: float) -> None:
            setup.on_progress(cells[number], step, loss)

        try:
            with closing(in_processes(work, tasks, jobs, report)) as done:
                for number, result in done:
                    yield cells[number], CellOutcome(*result)
                    # Whoever takes the next outcome has stored this one.
                    if not setup.keep:
                        shutil.rmtree(setup.folder / cells[number].slug, ignore_errors=True)
        except RunError as error:
            raise BadInput(str(error)) from None
        except Interrupted as stop:
            if stop.code == 128 + signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
        finally:
            # Empty unless a cell was interrupted or kept, or another process is training cells in it.
            with suppress(OSError):
                setup.folder.rmdir()

    return run


def train_cell(
    build: Build, score: ScoreRun, data: Path | None, device: str, task: tuple[CellConfig, Path], report: Report
) -> tuple[dict[str, Any], float]:
    """Train and score one cell, or resume it; return its metrics and the seconds of all its parts."""
    config, folder = task
    here = local_settings(device, config)
    learned, training = build(config, data)
    start_afresh(device)
    training = replace(training, **here)
    about = {"data": str(data.resolve())} if data else {}
    diverged = None
    try:
        train(learned, training, folder, console=Console(quiet=True), about=about, watch=_Watch(report))
    except Diverged as error:
        diverged = error.step
    except CheckpointError as error:
        raise OSError(f"{folder.name}: {error}") from None
    records = read_log(folder / "log.jsonl")
    metrics = measurements(records, learned.score)
    start = time.perf_counter()
    if diverged is None:
        # A GPU would otherwise keep the training's memory while the evaluation asks for its own.
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        metrics |= score(config, folder, data, device)
    else:
        metrics |= {"diverged_at": diverged}
    wall = max((record.get("wall_s", 0.0) for record in records), default=0.0)
    return metrics, wall + time.perf_counter() - start


def measurements(records: Sequence[Mapping[str, Any]], score: Score) -> dict[str, Any]:
    """Return the metrics in the log of a run; `curve`, best and last are of what `score` names."""
    valid = [[r["step"], r[score.name]] for r in records if r["kind"] == "valid"]
    train = [r for r in records if r["kind"] == "train"]
    # The log writes what is not a number as text.
    scores = [value for _, value in valid if not isinstance(value, str)]
    thin = train[:: -(-len(train) // POINTS)] if train else []
    return {
        "curve": [[step, None if isinstance(value, str) else value] for step, value in valid],
        "training_curve": [[r["step"], r["loss"]] for r in thin if not isinstance(r["loss"], str)],
        f"best_{score.name}": (max if score.higher_is_better else min)(scores, default=None),
        f"last_{score.name}": scores[-1] if scores else None,
        "steps": max((r["step"] for r in records), default=0),
        "tokens": int(max((r["tokens"] for r in train), default=0)),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in train) if train else None,
        "memory_bytes": max((r["memory_bytes"] for r in train), default=None),
    }


def local_settings(device: str, config: CellConfig) -> dict[str, Any]:
    """Return the settings that change no result: those for this machine, and those that the cell asks for."""
    kind, _, number = device.partition(":")
    if number not in ("", "0"):
        raise BadInput(f"models are trained on the first GPU, not on {device}; set CUDA_VISIBLE_DEVICES={number}")
    usual = {"accelerator": kind, "devices": "auto", "tensorboard": False, "checkpoint_minutes": 2.0, "keep": 1}
    asked = {name: value for name, value in config.get("set", {}).items() if name in TrainingConfig.free()}
    return {**usual, **asked}


def check_settings(fields: Fields, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError for settings that do not exist or that have an option of their own."""
    for name in settings:
        fields.check(name)
        if name in OWN_OPTIONS:
            raise ValueError(f"{name} is not for --set: it follows from {OWN_OPTIONS[name]}")


def cell_config(
    place: Sequence[Any], given: Mapping[str, Mapping[str, Any]], training: TrainingConfig, **more: Any
) -> dict[str, Any]:
    """Return the configuration of a cell at a place (scale, model, size, seed): the inputs, its training and `more`.

    Of the training, it has all that can change the result.
    """
    free = TrainingConfig.free() - {"eval_every"}
    about = storable({name: value for name, value in training.describe().items() if name not in free})
    where = dict(zip(("scale", "model", "size", "seed"), place, strict=True))
    inputs = {name: dict(value) for name, value in given.items()}
    return {**where, **inputs, "steps": about["steps"], **more, "training": about}


def read_or_measure(path: Path, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a score from the file that an interrupted command left, or measure it and write that file."""
    if not path.exists():
        write_atomically(path, json.dumps(storable(measure())).encode())
    score: dict[str, Any] = json.loads(path.read_text())
    return score


def training_of(config: CellConfig, **more: Any) -> TrainingConfig:
    """Return the training of a cell, in whose configuration JSON has turned tuples into lists."""
    values = {**config["training"], **more}
    return TrainingConfig(**{**values, "betas": tuple(values["betas"])})


def start_afresh(device: str) -> None:
    """Make a model independent of those before it: forget what was compiled, release memory, and reset its peak.

    `torch.compile` gives up on a function, without a word, after eight versions of it, and every model is another. The
    peak is that of the GPU, and on Linux that of the process.
    """
    # Loaded by whatever compiles first, in a second or two.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        # Not every C library has it.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        # Some containers forbid it: the peak is then that of the process so far.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


class _Watch:
    """Reports the losses of the log. Where nobody listens any more, it asks the run to save and stop."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def write(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "event" or isinstance(record["loss"], str):
            return
        try:
            self.report(record["step"], record["loss"])
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass


def _folder(cell: Cell, setup: Setup) -> Path:
    """Return the folder of a cell that is about to begin; with `force`, remove what an earlier command left."""
    folder = setup.folder / cell.slug
    if setup.force and folder.exists():
        shutil.rmtree(folder)
    return folder


def _in_a_process(work: Work, task: tuple[CellConfig, Path], report: Report) -> tuple[dict[str, Any], float]:
    """Train one cell in a process of its own, whose errors come out as those of the sweep."""
    try:
        return work(task, report)
    except (RunError, ValueError, BadInput, ImportError) as error:
        raise BadInput(str(error)) from None
    except OSError:
        raise
    except Exception:
        raise RuntimeError(f"{task[1].name} failed:\n{traceback.format_exc()}") from None
