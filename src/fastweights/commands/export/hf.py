"""`fastweights export hf`: a trained model as a folder of Hugging Face's transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastweights.commands.options import require
from fastweights.commands.results import Which, check_names, run_errors


def export_hf(
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
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"Written to {out}: {type(model).__name__}, {size / 1e6:.1f} MB")
