"""What `fastweights eval lm` and `eval mt` share: errors, progress, and the file that is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from fastweights.commands.training_options import say


def provenance_of(device: str) -> dict[str, Any]:
    """Which code and machine a number is from."""
    from fastweights.common import provenance

    about = {"commit": provenance.commit(), "hardware": provenance.hardware(device), "device": device}
    return {**about, "versions": provenance.versions()}


def leave(files: Mapping[Path, str], *lines: str) -> None:
    """Write files, then print lines and where the files are: a reader that closes the pipe early costs no file.

    A file that cannot be written costs nothing else; it ends the command with exit code 1 after all the rest.
    """
    from fastweights.common.files import write_atomically

    written = []
    for path, text in files.items():
        try:
            write_atomically(path, text.encode())
            written.append(path)
        except OSError as error:
            say(f"Error: {path} cannot be written: {error.strerror}")
    for line in (*lines, *(f"Written to {path}" for path in written)):
        typer.echo(line)
    if len(written) < len(files):
        raise typer.Exit(1)


def as_json(record: dict[str, Any]) -> str:
    """The text of a record's file."""
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


@contextmanager
def run_errors(*more: type[Exception]) -> Iterator[None]:
    """Wrong input, or a run that cannot be used, ends the command with a sentence and exit code 2."""
    from fastweights.training.runs.checkpoint import CheckpointError
    from fastweights.training.runs.folder import RunError

    known: tuple[type[Exception], ...] = (ValueError, TypeError, RunError, CheckpointError, *more)
    try:
        yield
    except known as error:
        say(f"Error: {error}")
        raise typer.Exit(2) from None


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Progress in things of that name: a bar with the time left on a terminal, a line for each tenth elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        said = 0

        def line(done: int, total: int) -> None:
            nonlocal said
            if 10 * done // total > said:
                said = 10 * done // total
                say(f"{done:,} of {total:,} {what}")

        yield line
        return
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("scoring", total=None)

        def bar(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield bar
