"""`fastweights export run`: a trained model in the form of a run, small and with a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastweights.commands.options import option
from fastweights.commands.results import Which, check_names, run_errors
from fastweights.common.tables import look_up
from fastweights.training.runs.export import DTYPES, export
from fastweights.training.runs.saved import LanguageRun, TranslationRun, task_of


def export_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `fastweights train`.")],
    out: Annotated[Path, option("New folder to write to.", False)],
    precision: Annotated[str, option(f"Of the weights in the file: {', '.join(DTYPES)}.")] = "fp32",
    note: Annotated[str, option("Text for the card: what the model is, its data and their licence.")] = "",
    checkpoint: Which = "best",
) -> None:
    """Write a trained model without the files that only training needs, with its tokenizer, its scores and a card.

    The folder can be used wherever the folder of a run can: by eval, generate, translate and `fastweights.load`.
    """
    with run_errors():
        check_names(checkpoint)
        dtype = look_up(DTYPES, precision, "precision")
        opened = TranslationRun.open(run) if task_of(run) == TranslationRun.name else LanguageRun.open(run)
        written = export(opened, out, which=checkpoint, dtype=dtype, note=note)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"Written to {out}: {written.folder.name}, {size / 1e6:.1f} MB; {out / 'README.md'} describes it")
