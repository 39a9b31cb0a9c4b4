"""`fastweights translate`: lines of text through a trained translation model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer

from fastweights.commands.device import pick_device
from fastweights.commands.results import run_errors


def translate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `fastweights train mt`.")],
    beam: Annotated[int, typer.Option(help="Hypotheses kept at each step; 1 is greedy search.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Above 0 favours longer translations.")] = 0.6,
    n_best: Annotated[int, typer.Option(help="Translations of each line: LINE, SCORE and TEXT, with tabs.")] = 1,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a translation.", show_default="those of the line and 50")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Lines at once.", show_default="as many as suit the device")] = None,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Translate standard input, line by line, to standard output: as many lines, in their order, empty ones too.

    Lines are read and translated in groups, so that those of like length go together; from a terminal one at a time.
    """
    with run_errors():
        from fastweights.inference import translate as translation
        from fastweights.inference.beam import Search
        from fastweights.ops.tables import look_up
        from fastweights.training.translation_run import TranslationRun

        look_up(dict.fromkeys(("best", "last")), checkpoint, "checkpoint")
        search = Search(beam=beam, length_penalty=length_penalty, n_best=n_best, max_length=max_length)
        if batch is not None and batch < 1:
            raise ValueError(f"--batch must be at least 1, got {batch}")
        device = pick_device(device)
        opened = TranslationRun.open(run)
        tokenizer = opened.tokenizer()
        model, _ = opened.load(checkpoint, device)
    window = 1 if sys.stdin.isatty() else None
    try:
        with run_errors():
            groups = translation.stream(model, tokenizer, _lines(sys.stdin), search, batch=batch, window=window)
            for number, found in enumerate(groups, 1):
                if n_best == 1:
                    sys.stdout.write(f"{found[0].text if found else ''}\n")
                for translated in found if n_best > 1 else []:
                    sys.stdout.write(f"{number}\t{translated.score:.4f}\t{translated.text}\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python would complain once more when it closes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None


def _lines(file: TextIO) -> Iterator[str]:
    for line in file:
        yield line.rstrip("\n")
