"""`fastweights translate`: lines of text through a trained translation model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fastweights.commands.device import pick_device
from fastweights.commands.lines import waiting_lines
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
    graph: Annotated[
        bool, typer.Option("--graph", help="Steps as CUDA graphs: for decoders of fast weights on a GPU.")
    ] = False,
) -> None:
    """Translate standard input, line by line, to standard output: as many lines, in their order, empty ones too.

    Lines that are waiting are translated together, so that those of like length meet; nobody waits for lines to come.
    """
    with run_errors():
        from fastweights.common.tables import look_up
        from fastweights.inference import translate as translation
        from fastweights.inference.beam import Search
        from fastweights.training.runs.saved import TranslationRun

        look_up(dict.fromkeys(("best", "last")), checkpoint, "checkpoint")
        search = Search(beam=beam, length_penalty=length_penalty, n_best=n_best, max_length=max_length)
        if batch is not None and batch < 1:
            raise ValueError(f"--batch must be at least 1, got {batch}")
        device = pick_device(device)
        opened = TranslationRun.open(run)
        tokenizer = opened.tokenizer()
        model, _ = opened.load(checkpoint, device)
    try:
        with run_errors():
            groups = waiting_lines(sys.stdin.buffer, "standard input")
            translations = translation.stream(model, tokenizer, groups, search, batch=batch, graph=graph)
            for number, found in enumerate(translations, 1):
                if n_best == 1:
                    text = f"{found[0].text if found else ''}\n"
                else:
                    text = "".join(f"{number}\t{best.score:.4f}\t{best.text}\n" for best in found)
                # As UTF-8, which is how lines are read, whatever the terminal has.
                sys.stdout.buffer.write(text.encode())
                sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python would complain once more when it closes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
