"""What the commands on trained models share: their options, loading, progress, and the files they leave."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastweights.commands.options import as_json, input_errors, interruptible, option, print_json, say
from fastweights.common.files import write_atomically
from fastweights.common.formatting import format_seconds
from fastweights.common.tables import look_up
from fastweights.training.runs.checkpoint import CheckpointError
from fastweights.training.runs.folder import RunError

LanguageFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run of `fastweights train lm`, or demo.")
]
TranslationFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `fastweights train mt`.")]
Split = Annotated[str, option("valid or test.")]
Which = Annotated[str, typer.Option("--checkpoint", help="best or last.")]
Beam = Annotated[int, option("Hypotheses kept at each step; 1 is greedy search.")]
LengthPenalty = Annotated[float, option("Above 0 favours longer translations.")]
# Seconds until a line that tells how far the work has come, and how many it must take to be told an estimate.
SILENCE, LONG = 2.0, 10.0


def check_names(checkpoint: str, split: str = "valid") -> None:
    """Raise a ValueError for an unknown checkpoint or split."""
    look_up(dict.fromkeys(("best", "last")), checkpoint, "checkpoint")
    look_up(dict.fromkeys(("valid", "test")), split, "split")


def check_batch(batch: int | None) -> None:
    """Raise a ValueError for a batch size below 1."""
    if batch is not None and batch < 1:
        raise ValueError(f"--batch must be at least 1, got {batch}")


def keep_result(
    path: Path, record: dict[str, Any], lines: list[str], json: bool, more: Mapping[Path, str] = {}
) -> None:
    """Write the record and more files, then print lines, or the record as JSON, and where the files are.

    A reader that closes the pipe early costs no file. A file that cannot be written costs nothing else; it ends the
    command with exit code 1 after all the rest.
    """
    written, files = [], {path: as_json(record), **more}
    for file, text in files.items():
        try:
            write_atomically(file, text.encode())
            written.append(file)
        except OSError as error:
            say(f"Error: {file} cannot be written: {error.strerror}")
    if json:
        print_json(record)
    for line in (*lines, *(f"Written to {file}" for file in written)):
        typer.echo(line, err=json)
    if len(written) < len(files):
        raise typer.Exit(1)


def run_errors() -> AbstractContextManager[None]:
    """End the command with a sentence and exit code 2 where the input is wrong or a run cannot be used."""
    return input_errors((ValueError, TypeError, ImportError, RunError, CheckpointError))


@contextmanager
def writing() -> Iterator[None]:
    """End the command quietly when the reader of standard output closes it, and with exit code 130 on Ctrl-C."""
    try:
        with interruptible(), run_errors():
            yield
    except BrokenPipeError:
        # Python would complain once more when it closes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None


@contextmanager
def measuring(what: str, faster: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show progress counted in `what`: a bar with the time left on a terminal, a line for each tenth elsewhere.

    Work that will take long is announced with an estimate of its time and what would be `faster`. Ctrl-C ends the
    command with exit code 130.
    """
    console = Console(stderr=True)
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeRemainingColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, tenths, start, patience = bars.add_task("scoring", total=None), 0, time.monotonic(), SILENCE

    def show(done: int, total: int) -> None:
        nonlocal tenths, patience
        bars.update(task, completed=done, total=total)
        spent = time.monotonic() - start
        whole, waited = spent * total / done, spent > patience
        if waited:
            patience = math.inf
        if waited or (not console.is_terminal and 10 * done // total > tenths):
            tenths = 10 * done // total
            estimate = f"; about {format_seconds(whole)} in all{faster}" if waited and whole > LONG else ""
            bars.console.print(f"{done:,} of {total:,} {what}{estimate}", highlight=False, soft_wrap=True)

    stopped = "Stopped: part of a split has no score to keep, so nothing was written."
    with interruptible(stopped), run_errors(), bars:
        yield show
