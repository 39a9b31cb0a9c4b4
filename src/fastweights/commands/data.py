"""`fastweights data`: a corpus from its files to the folder that training reads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastweights.commands.options import flag, input_errors, interruptible, option, require, say
from fastweights.common.tables import look_up
from fastweights.data.manifest import Report
from fastweights.data.prepare import prepare
from fastweights.data.registry import CORPORA
from fastweights.data.tokenizer import PIECES, TOKENIZERS


def data(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help=f"One of {', '.join(CORPORA)}; --list describes them.")
    ] = None,
    source: Annotated[Path | None, option("Files of the corpus: a folder, a file or a zip archive.", False)] = None,
    out: Annotated[Path | None, option("Folder to write to.", "data/KIND")] = None,
    valid: Annotated[
        Path | None, option("text, ids: validation file; wmt14, parallel: PATH of PATH.en and PATH.de.")
    ] = None,
    test: Annotated[Path | None, option("The same for the test set.")] = None,
    tokens: Annotated[str | None, option(f"text, embedded: kind of tokens: {', '.join(TOKENIZERS)}.", "words")] = None,
    vocabulary_size: Annotated[
        int | None,
        typer.Option(
            "--vocabulary-size",
            "--vocab",
            "--max-words",
            help="Largest vocabulary: the most frequent words or characters; for bpe and pairs, the number of pieces.",
            show_default=f"all words or characters; bpe {PIECES}, pairs 32000, numbers 400",
        ),
    ] = None,
    min_count: Annotated[
        int | None,
        option(
            "text, embedded: rarer words become <unk>, characters are spelled in bytes, pairs are not merged.",
            "1, embedded 3",
        ),
    ] = None,
    source_language: Annotated[
        str | None, option("parallel: language to translate from, the ending of its file names.", "en")
    ] = None,
    target_language: Annotated[str | None, option("parallel: language to translate to.", "de")] = None,
    pairs: Annotated[int | None, option("numbers: pairs to train on.", "20000")] = None,
    held_out: Annotated[int | None, option("numbers: pairs for validation and for the test.", "500")] = None,
    highest: Annotated[int | None, option("numbers: the highest number.", "999")] = None,
    allow_other: Annotated[
        bool, flag("allow-other", "Accept another corpus in the format of KIND, under its own name.")
    ] = False,
    force: Annotated[bool, flag("force", "Prepare the corpus again even if it is finished.")] = False,
    list_: Annotated[bool, flag("list", "Show the kinds of corpus and where to get them.")] = False,
) -> None:
    """Prepare a corpus for training: build its vocabulary, write its tokens, and record counts and checksums."""
    options = {name: value for name, value in locals().items() if any(name in row.options for row in CORPORA.values())}
    if list_:
        for name, row in CORPORA.items():
            typer.echo(f"{name:<12} {row.what}\n{'':<13}{row.obtain}")
        return
    start = time.monotonic()
    stopped = "Stopped: nothing was finished; the same command starts again."
    with interruptible(stopped), input_errors((ValueError, ImportError)), _display() as report:
        if kind is None:
            raise ValueError(f"name a corpus: {', '.join(CORPORA)}; --list says more")
        row, out = look_up(CORPORA, kind, "corpus"), out or Path("data") / kind
        require(*row.needs)
        if source is None and row.hub is not None and (force or not (out / "manifest.json").exists()):
            require("datasets", otherwise=row.obtain)
        done = prepare(kind, source, out, allow_other=allow_other, force=force, report=report, **options)
    _summary(done.manifest)
    if done.fresh:
        typer.echo(f"Written to {out} in {time.monotonic() - start:.0f} s")
    else:
        typer.echo(f"Found finished in {out}; --force prepares it again")


def _summary(manifest: dict[str, Any]) -> None:
    published = CORPORA[manifest["kind"]].official is not None
    other = (
        f", in the format of {manifest['kind']} but not that corpus" if published and not manifest["official"] else ""
    )
    size, kind = manifest["vocabulary"]["size"], manifest["vocabulary"]["kind"]
    units = f"{TOKENIZERS[kind].unit}s" if kind in TOKENIZERS else kind
    typer.echo(f"{manifest['name']}{other}: {size:,} {units}")
    for split, entry in manifest["splits"].items():
        name = f" of {entry['set']}" if "set" in entry else ""
        if "pairs" in entry:
            counts = [
                f"{entry['files'][side]['tokens']:,} {language}"
                for side, language in zip(("source", "target"), manifest["languages"], strict=True)
            ]
            note = f"; {entry['left_out']:,} left out as a side is empty" if entry["left_out"] else ""
            typer.echo(f"  {split:<6}{entry['pairs']:>12,} pairs{name}, tokens: {', '.join(counts)}{note}")
            continue
        outside = entry["out_of_vocabulary"]
        note = f", {outside:,} of them outside the vocabulary" if outside else ""
        if "text_bytes" in entry:
            note += f", {entry['text_bytes'] / max(entry['tokens'], 1):.2f} bytes per token"
        typer.echo(f"  {split:<6}{entry['tokens']:>12,} tokens{name}{note}")


@contextmanager
def _display() -> Iterator[Report]:
    """Show progress: a bar for each stage on a terminal, a line elsewhere."""
    console, current = Console(stderr=True), ""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f} %"))
    bars = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)

    def show(stage: str, fraction: float) -> None:
        nonlocal current
        if stage != current:
            current = stage
            bars.add_task(stage, total=1.0)
            if not console.is_terminal:
                say(stage)
        bars.update(bars.task_ids[-1], completed=fraction)

    with bars:
        yield show
