"""`fastweights eval mt`: the BLEU score of a trained translation model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.commands.device import pick_device
from fastweights.commands.results import as_json, counting, leave, provenance_of, run_errors
from fastweights.commands.training_options import say

# Sentences kept in the JSON file beside the score.
SAMPLES = 20


def mt(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `fastweights train mt`.")],
    split: Annotated[str, typer.Option(help="valid or test.")] = "valid",
    beam: Annotated[int, typer.Option(help="Hypotheses kept at each step; 1 is greedy search.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Above 0 favours longer translations.")] = 0.6,
    batch: Annotated[
        int | None, typer.Option(help="Sentences at once.", show_default="as many as suit the device")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
    data: Annotated[Path | None, typer.Option(help="The pairs, if they were moved since the training.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the translations to this file too, a line each.", show_default="nowhere")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Translate a split, print its BLEU score with sacreBLEU's signature, and keep it as JSON in RUN/eval.

    The score is that of the text as people write it, against the references as they were read.
    """
    with run_errors(ImportError):
        from fastweights.common.tables import look_up
        from fastweights.inference.beam import Search
        from fastweights.inference.translate import translate
        from fastweights.training.runs.saved import TranslationRun
        from fastweights.training.tasks.bleu import bleu, require_sacrebleu

        require_sacrebleu()
        look_up(dict.fromkeys(("valid", "test")), split, "split")
        look_up(dict.fromkeys(("best", "last")), checkpoint, "checkpoint")
        Search(beam=beam, length_penalty=length_penalty)
        if batch is not None and batch < 1:
            raise ValueError(f"--batch must be at least 1, got {batch}")
        device = pick_device(device)
        opened = TranslationRun.open(run)
        corpus = opened.corpus(data)
        pairs = corpus.split(split)
        model, source = opened.load(checkpoint, device)
    start = time.monotonic()
    how: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty}
    try:
        with run_errors(), counting("sentences") as report:
            found = translate(model, corpus.tokenizer, pairs.sources, **how, batch=batch, report=report)
    except KeyboardInterrupt:
        say("Stopped: part of a split has no score to keep, so nothing was written.")
        raise typer.Exit(130) from None
    wall = time.monotonic() - start
    score = bleu(found, pairs.targets)
    samples = list(zip(pairs.sources[:SAMPLES], found[:SAMPLES], pairs.targets[:SAMPLES], strict=True))
    record = {
        "run": str(run),
        "checkpoint": source.folder.name,
        "step": source.step,
        "split": split,
        "corpus": corpus.manifest["name"],
        "fingerprint": corpus.fingerprint,
        **how,
        "bleu": score.score,
        "signature": score.signature,
        "sentences": len(found),
        "wall_s": wall,
        "sentences_per_s": len(found) / wall,
        "samples": [dict(zip(("source", "translation", "reference"), sample, strict=True)) for sample in samples],
        **provenance_of(device),
    }
    kind = "best" if source.folder.name.startswith("best") else "last"
    path = run / "eval" / f"{split}-beam{beam}-penalty{length_penalty:g}-{kind}.json"
    translations = {} if out is None else {out: "".join(f"{line}\n" for line in found)}
    leave(
        {path: as_json(record), **translations},
        f"BLEU {score.score:.2f}  ({score.signature})",
        f"{len(found):,} sentences in {wall:.1f} s, {len(found) / wall:.1f} a second",
    )
