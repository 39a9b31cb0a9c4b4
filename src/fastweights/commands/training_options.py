"""What `fastweights train lm` and `train mt` share: options, their meaning, and what happens around the training."""

from __future__ import annotations

import json
import os
import shlex
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer

if TYPE_CHECKING:
    from fastweights.training.engine.config import Fields, TrainingConfig
    from fastweights.training.engine.loop import Result
    from fastweights.training.engine.task import Task

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}


def own(help: str, default: str = "the preset's") -> Any:
    """An option whose default is decided elsewhere."""
    return typer.Option(help=help, show_default=default)


Steps = Annotated[int | None, own("Updates of the weights.")]
Rate = Annotated[float | None, own("Learning rate after the warm-up.")]
Warmup = Annotated[int | None, own("Updates of warm-up.")]
Seed = Annotated[int | None, own("Of initial weights, dropout and the order of batches.", "1111")]
Precision = Annotated[str | None, own("fp32, bf16 (mixed), bf16-true or 64-true.", "fp32")]
Accumulate = Annotated[int | None, own("Batches in an update.")]
Devices = Annotated[str | None, own("Number of devices, or auto for one or what torchrun started.", "auto")]
Strategy = Annotated[str | None, own("auto, single, ddp or fsdp.", "auto")]
Compile = Annotated[str | None, own("Mode of torch.compile: default, reduce-overhead, ...", "not compiled")]
Graph = Annotated[bool, typer.Option("--graph", help="Record updates as CUDA graphs; one process, one GPU.")]
Minutes = Annotated[float | None, own("Stop after so long, saved, to be gone on with.", "no limit")]
EvalEvery = Annotated[int | None, own("Updates between validations.", "a tenth of them, or fewer")]
CheckpointEvery = Annotated[int | None, own("Updates between checkpoints.", "every ten minutes")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew; a run in the folder is moved aside.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Any field of model or training, VALUE as in JSON."),
]


def parse_devices(text: str | None) -> int | str | None:
    """The value of --devices."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--devices must be a number of at least 1, or auto, got {text!r}")
    return int(text)


def check_minutes(minutes: float | None) -> None:
    """A ValueError for minutes that could not begin."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {minutes:g}")


def read_settings(fields: Fields, entries: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, and the values of FIELD=VALUE with the types of their fields."""
    hints = fields.types()
    chosen = {name: value for name, value in given.items() if value is not None}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals:
            raise ValueError(f"--set takes FIELD=VALUE, got {entry!r}")
        fields.check(name)
        if name in chosen:
            raise ValueError(f"{name} is given twice: {chosen[name]!r} and {text!r}")
        chosen[name] = _value(name, text, hints[name])
    return chosen


def _value(name: str, text: str, hint: Any) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if fits(value, hint):
        return value
    # A number where a name is meant is that name.
    if fits(text, hint):
        return text
    shown = getattr(hint, "__name__", str(hint)).replace("NoneType", "None")
    raise ValueError(f'{name} takes {shown}, got {text!r}; write it as in JSON: 3, 0.5, true, null, [1,2], {{"nu":2}}')


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON can stand for a field of that type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if origin is tuple:
        if not isinstance(value, list):
            return False
        expected = [inner[0]] * len(value) if Ellipsis in inner else list(inner)
        return len(value) == len(expected) and all(map(fits, value, expected))
    if origin is Mapping:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def run_training(
    task: Task,
    config: TrainingConfig,
    out: Path,
    *,
    about: dict[str, Any],
    keep: Callable[[], None],
    fresh: bool,
    minutes: float | None,
) -> Result:
    """Train with progress on the terminal; what goes wrong ends the command with a sentence and an exit code.

    `keep` writes what the run needs beside it, before the training begins.
    """
    from rich.console import Console

    from fastweights.training.engine.diagnosis import Diverged
    from fastweights.training.engine.loop import train
    from fastweights.training.runs.checkpoint import CheckpointError
    from fastweights.training.runs.folder import RunError

    about = {**about, **_provenance()}
    try:
        with input_errors(ValueError, ImportError):
            keep()
            return train(task, config, out, fresh=fresh, minutes=minutes, about=about, console=Console(stderr=True))
    except RunError as error:
        say(f"Error: {error}" + ("" if fresh else "\n--fresh starts anew, --out chooses another folder"))
        raise typer.Exit(2) from None
    except (CheckpointError, Diverged) as error:
        say(f"Error: {error}")
        raise typer.Exit(1) from None


def _provenance() -> dict[str, Any]:
    import torch

    from fastweights.common import provenance

    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = {"commit": provenance.commit(), "hardware": provenance.hardware(device), "versions": provenance.versions()}
    return {**where, "command": shlex.join(["fastweights", *sys.argv[1:]])}


def summary(result: Result, out: Path) -> str:
    """Where the run stands."""
    state = "finished" if result.finished else "not finished; the same command goes on"
    return f"Run: {out} at step {result.step} ({state}), {result.wall_s:.0f} s of training"


def prepare_once(kind: str, what: str, folder: Path) -> None:
    """Prepare a corpus that needs no download where it is not there yet."""
    from fastweights.data.prepare import prepare

    if not (folder / "manifest.json").exists() and first_process():
        say(f"Preparing {what} as a corpus in {folder}")
    prepare(kind, None, folder)


def first_process() -> bool:
    """Whether this process is the one that speaks; torchrun and Lightning number the others in the environment."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C outside of the training loop, which has its own."""
    try:
        yield
    except KeyboardInterrupt:
        say("Stopped; what was saved stays, and the same command goes on from it.")
        raise typer.Exit(130) from None


@contextmanager
def input_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Wrong input ends the command with a sentence and exit code 2."""
    try:
        yield
    except kinds as error:
        say(f"Error: {error}")
        raise typer.Exit(2) from None


def say(message: str) -> None:
    """To the terminal, beside what the command gives."""
    typer.echo(message, err=True)
