"""`fastweights eval lm`: the perplexity of a trained language model."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastweights.commands.device import pick_device
from fastweights.commands.evaluate_mt import mt
from fastweights.commands.results import as_json, counting, leave, provenance_of, run_errors
from fastweights.commands.training_options import say

if TYPE_CHECKING:
    from fastweights.training.tasks.evaluate import Perplexity

app = typer.Typer(help="Measure a trained model.", no_args_is_help=True)
app.command()(mt)


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
        from fastweights.common.tables import look_up
        from fastweights.data.text.documents import mark_documents
        from fastweights.training.runs.saved import LanguageRun
        from fastweights.training.tasks import evaluate

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
        with run_errors(), counting("tokens") as report:
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
    record = {**about, **_numbers(found, wall), **provenance_of(device)}
    what = "byte" if corpus.vocabulary.kind == "bytes" else "word"
    leave(
        {path: as_json(record)},
        f"perplexity {found.ppl:.3f}, {found.bits:.4f} bits per {what}",
        f"{found.tokens:,} tokens scored in {wall:.1f} s, {found.tokens / wall:,.0f} tokens/s",
    )


def _numbers(found: Perplexity, wall: float) -> dict[str, Any]:
    numbers = {"ppl": found.ppl, "loss": found.loss, "bits_per_token": found.bits}
    # JSON has no NaN and no infinity.
    plain = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    return {**plain, "tokens": found.tokens, "wall_s": wall, "tokens_per_s": found.tokens / wall}
