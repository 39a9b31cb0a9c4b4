"""`fastweights export onnx`: a trained language model as an ONNX file, with its state going in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastweights.commands.options import option, require
from fastweights.commands.results import LanguageFolder, Which, check_names, run_errors
from fastweights.onnx.export import OPERATORS, agreement, export_onnx
from fastweights.training.runs.saved import LanguageRun

# Largest relative difference from PyTorch.
LIMIT = 1e-5


def onnx(
    run: LanguageFolder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as model.onnx.")],
    step: Annotated[
        bool, typer.Option("--step", help="Accept one token, for decoding, instead of any number.")
    ] = False,
    operators: Annotated[
        str,
        option(
            f"What the memory becomes: {', '.join(OPERATORS)}. contrib is for ONNX Runtime, standard needs opset 27, "
            "plain runs anywhere."
        ),
    ] = "contrib",
    checkpoint: Which = "best",
) -> None:
    """Write a language model as ONNX: tokens and state go in, log probabilities and the new state come out.

    The file is then run in ONNX Runtime and compared with PyTorch, except with `--operators standard`, which ONNX
    Runtime does not support yet.
    """
    with run_errors():
        require("onnx", "onnxruntime", "onnxscript")
        check_names(checkpoint)
        model, _ = LanguageRun.open(run).load(checkpoint)
        export_onnx(model, file, step=step, operators=operators)
    typer.echo(f"Written to {file}: {file.stat().st_size / 1e6:.1f} MB")
    if operators == "standard":
        return
    worst = max(agreement(model, file, step=step).values())
    typer.echo(f"Under ONNX Runtime it differs from PyTorch by {worst:.0e}, relative to the largest number")
    if worst > LIMIT:
        typer.echo(f"Error: more than {LIMIT:.0e}; do not use {file}", err=True)
        raise typer.Exit(1)
