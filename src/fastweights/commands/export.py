"""`fastweights export`: a trained model for others to use, in the forms that it may have."""

from pathlib import Path
from typing import Annotated

import typer

from fastweights.commands.options import flag, option, require
from fastweights.commands.results import LanguageFolder, Which, check_names, run_errors
from fastweights.common.tables import look_up
from fastweights.onnx.export import OPERATORS, agreement, export_onnx
from fastweights.training.runs.export import DTYPES, export
from fastweights.training.runs.saved import LanguageRun, TranslationRun, task_of

# Largest relative difference of ONNX Runtime from PyTorch.
LIMIT = 1e-5


def hf(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `fastweights train`, or demo.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write to.")],
    checkpoint: Which = "best",
) -> None:
    """Write a trained model and its tokenizer for transformers: `AutoModelForCausalLM.from_pretrained(DIR)`.

    Import fastweights.huggingface before that, or pass trust_remote_code=True.
    """
    with run_errors():
        check_names(checkpoint)
        require("transformers")
        from fastweights.huggingface.folder import write_folder

        model = write_folder(run, out, checkpoint)
    typer.echo(f"Written to {out}: {type(model).__name__}, {_megabytes(out):.1f} MB")


def onnx(
    run: LanguageFolder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as model.onnx.")],
    step: Annotated[bool, flag("step", "Accept one token, for decoding, instead of any number.")] = False,
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


def run(
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
    about = f"{written.folder.name}, {_megabytes(out):.1f} MB; {out / 'README.md'} describes it"
    typer.echo(f"Written to {out}: {about}")


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
