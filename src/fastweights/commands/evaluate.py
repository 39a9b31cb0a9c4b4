"""`fastweights eval lm`: the perplexity of a trained language model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastweights.commands.device import pick_device
from fastweights.commands.train import say

if TYPE_CHECKING:
    from fastweights.training.evaluate import Perplexity, Report

app = typer.Typer(help="Measure a trained model.", no_args_is_help=True)


@app.callback()
def _eval() -> None:
    """Keeps `lm` a word of the command line while it is the only thing to evaluate."""


@app.command()
def lm(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `fastweights train lm`.")],
    split: Annotated[str, typer.Option(help="valid or test.")] = "valid",
    protocol: Annotated[
        str,
        typer.Option(
            help="segment: as validation in training; sliding: a window moved word by word; carried: segments of which "
            "each goes on from the state of the one before."
        ),
    ] = "segment",
    stride: Annotated[
        int | None, typer.Option(help="sliding: words from one window to the next.", show_default="1")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Windows at once, or rows of text.", show_default="10; sliding: what fits; carried: 1"),
    ] = None,
    segment: Annotated[
        int | None, typer.Option(help="Words in a segment or window.", show_default="as in training")
    ] = None,
    mem_len: Annotated[
        int | None, typer.Option(help="xl: words remembered. Table 4 has 15, 64, 128, 384.", show_default="as trained")
    ] = None,
    clamp_len: Annotated[
        int | None, typer.Option(help="xl: greatest distance told apart.", show_default="the segment of training")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
    data: Annotated[Path | None, typer.Option(help="The corpus, if it was moved since the training.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Print the perplexity of a run's model and keep it as JSON in RUN/eval.

    The paper's numbers are those of `--protocol sliding`, and in Table 4 of `--protocol carried`.
    """
    with run_errors():
        from fastweights.data.documents import mark_documents
        from fastweights.ops.tables import look_up
        from fastweights.training import evaluate
        from fastweights.training.language_run import LanguageRun

        look_up(dict.fromkeys(("valid", "test")), split, "split")
        look_up(dict.fromkeys(("best", "last")), checkpoint, "checkpoint")
        device = pick_device(device)
        opened = LanguageRun.open(run)
        if protocol == "segment" and batch is None:
            batch = opened.task["eval_batch"]
        how = evaluate.protocol(
            protocol,
            opened.model,
            opened.segment,
            carried=opened.carried,
            segment=segment,
            stride=stride,
            batch=batch,
            mem_len=mem_len,
            clamp_len=clamp_len,
            device=device,
        )
        corpus = opened.corpus(data)
        stream = mark_documents(corpus.split(split), corpus.vocabulary, opened.documents)
        stream = stream if device == "cpu" else stream.to(device)
        model, source = opened.load(checkpoint, device)
    start = time.monotonic()
    try:
        with run_errors(), _display() as report:
            found = evaluate.measure(model, stream, how, report)
    except KeyboardInterrupt:
        say("Stopped: part of a text has no perplexity to keep, so nothing was written.")
        raise typer.Exit(130) from None
    wall = time.monotonic() - start
    about = {"run": str(run), "checkpoint": source.folder.name, "step": source.step, "split": split}
    about |= {"corpus": corpus.manifest["name"], "fingerprint": corpus.fingerprint, "protocol": how.describe()}
    about["documents"] = opened.documents
    if how.carry:
        if how.mem_len is not None:
            model.set_memory(how.mem_len, how.clamp_len)
        about["state_size"] = model.state_size(how.segment)
    kind = source.folder.name.split("-")[0]
    path = run / "eval" / f"{split}-{how.slug}-{'best' if kind == 'best' else 'last'}.json"
    _print(found, wall, corpus.vocabulary.kind)
    _write(path, {**about, **_numbers(found, wall), **_provenance(device)})


def _numbers(found: Perplexity, wall: float) -> dict[str, Any]:
    numbers = {"ppl": found.ppl, "loss": found.loss, "bits_per_token": found.bits}
    # JSON has no NaN and no infinity.
    plain = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    return {**plain, "tokens": found.tokens, "wall_s": wall, "tokens_per_s": found.tokens / wall}


def _print(found: Perplexity, wall: float, kind: str) -> None:
    what = "byte" if kind == "bytes" else "word"
    typer.echo(f"perplexity {found.ppl:.3f}, {found.bits:.4f} bits per {what}")
    typer.echo(f"{found.tokens:,} tokens scored in {wall:.1f} s, {found.tokens / wall:,.0f} tokens/s")


def _provenance(device: str) -> dict[str, Any]:
    from fastweights import provenance

    about = {"commit": provenance.commit(), "hardware": provenance.hardware(device), "device": device}
    return {**about, "versions": provenance.versions()}


def _write(path: Path, record: dict[str, Any]) -> None:
    from fastweights.files import write_atomically

    try:
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        say(f"Error: {path} cannot be written: {error.strerror}")
        raise typer.Exit(1) from None
    typer.echo(f"Written to {path}")


@contextmanager
def run_errors() -> Iterator[None]:
    """Wrong input, or a run that cannot be used, ends the command with a sentence and exit code 2."""
    from fastweights.training.checkpoint import CheckpointError
    from fastweights.training.folder import RunError

    try:
        yield
    except (ValueError, TypeError, RunError, CheckpointError) as error:
        say(f"Error: {error}")
        raise typer.Exit(2) from None


@contextmanager
def _display() -> Iterator[Report]:
    """A bar with the time left on a terminal, a line for each tenth elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        said = 0

        def line(done: int, total: int) -> None:
            nonlocal said
            if 10 * done // total > said:
                said = 10 * done // total
                say(f"{done:,} of {total:,} tokens")

        yield line
        return
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("scoring", total=None)

        def bar(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield bar
