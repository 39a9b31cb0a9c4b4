"""`fastweights train mt`: a translation model from a preset, sentence pairs and whatever should differ."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastweights.commands.training_options import (
    PRECISIONS,
    Accumulate,
    CheckpointEvery,
    Compile,
    Devices,
    EvalEvery,
    Fresh,
    Minutes,
    Precision,
    Rate,
    Seed,
    Settings,
    Steps,
    Strategy,
    Warmup,
    check_minutes,
    first_process,
    input_errors,
    interruptible,
    own,
    parse_devices,
    prepare_once,
    read_settings,
    run_training,
    say,
    summary,
)
from fastweights.data.manifest import NUMBERS

if TYPE_CHECKING:
    from fastweights.data.pairs.corpus import ParallelCorpus
    from fastweights.training.engine.loop import Result
    from fastweights.training.tasks.translation import TranslationTask


def mt(
    preset: Annotated[
        str, typer.Option(help="big, base or tiny: sizes and recipe; see models/translation_presets.py.")
    ],
    attention: Annotated[
        str, typer.Option(help="softmax, linear, performer or dpfp, wherever nothing else is said.")
    ] = "softmax",
    data: Annotated[
        Path | None, typer.Option(help="Prepared pairs.", show_default=f"{NUMBERS}, prepared on first use")
    ] = None,
    encoder: Annotated[str | None, own("Attention within the source.", "--attention")] = None,
    decoder: Annotated[str | None, own("Attention of the target to its past.", "--attention")] = None,
    cross: Annotated[str | None, own("Attention of the target to the source.", "--attention")] = None,
    features: Annotated[int | None, own("performer: its number m of random features.", "4 d_head")] = None,
    nu: Annotated[int | None, own("dpfp: its parameter ν.", "2")] = None,
    rule: Annotated[str | None, own("Of fast weights in the decoder: sum, delta, ...", "sum")] = None,
    out: Annotated[Path | None, own("Folder of the run.", "runs/mt-PRESET-ATTENTION")] = None,
    steps: Steps = None,
    tokens: Annotated[int | None, own("Tokens in a batch on either side, padding included, over all devices.")] = None,
    lr: Rate = None,
    warmup: Warmup = None,
    seed: Seed = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    devices: Devices = None,
    strategy: Strategy = None,
    compile: Compile = None,
    minutes: Minutes = None,
    eval_every: EvalEvery = None,
    checkpoint_every: CheckpointEvery = None,
    fresh: Fresh = False,
    settings: Settings = None,
) -> None:
    """Train a translation model, validate it by BLEU, and keep its best and last checkpoints in a folder.

    Ctrl-C saves and stops; the same command goes on from there. Without --data it learns to translate English number
    words to German ones, which needs no download.
    """
    with interruptible():
        with input_errors(ValueError, TypeError, ImportError):
            from fastweights.training.runs.saved import keep_vocabulary
            from fastweights.training.tasks.translation import FIELDS, assemble_translation, plan_translation

            given: dict[str, Any] = {"steps": steps, "max_tokens": tokens, "lr": lr, "warmup": warmup, "seed": seed}
            given |= {"precision": PRECISIONS.get(str(precision), precision), "accumulate": accumulate}
            given |= {"devices": parse_devices(devices), "strategy": strategy, "compile": compile}
            given |= {"eval_every": eval_every, "checkpoint_every": checkpoint_every}
            places = {"encoder": encoder, "decoder": decoder, "cross": cross}
            given |= {**places, "features": features, "nu": nu, "rule": rule}
            chosen = read_settings(FIELDS, settings or [], given)
            check_minutes(minutes)
            # Before a corpus is prepared for a model that cannot be.
            plan_translation(1, preset=preset, attention=attention, **chosen)
            where = NUMBERS if data is None else data
            corpus = _corpus(where, prepare_it=data is None)
            task, config = assemble_translation(corpus, preset=preset, attention=attention, **chosen)
            if out is None:
                else_where = [f"{place}_{name}" for place, name in places.items() if name not in (None, attention)]
                out = Path("runs") / "-".join(filter(None, ("mt", preset, attention, *else_where, rule)))
        _announce(task, corpus, out)
        # Absolute: the run may be used from another folder than the one it was started in.
        about = {"data": str(where.resolve()), "corpus": corpus.manifest["name"]}
        kept = lambda: keep_vocabulary(out, corpus.tokenizer, fresh)  # noqa: E731
        result = run_training(task, config, out, about=about, keep=kept, fresh=fresh, minutes=minutes)
    if first_process():
        _conclude(corpus, result, out)


def _announce(task: TranslationTask, corpus: ParallelCorpus, out: Path) -> None:
    if not first_process():
        return
    pairs = f"{len(corpus.split('train')):,} pairs of {corpus.manifest['name']}"
    long = f", {task.left_out:,} of them too long" if task.left_out else ""
    batches = f"{task.batches_per_epoch:,} batches an epoch"
    say(f"{task.n_parameters / 1e6:.2f} M parameters, {pairs}{long}, {batches}; the run is kept in {out}")
    if "performer" in task.model.attentions and not task.model.redraw:
        say("The Performer keeps its random features as first drawn; --set redraw=true draws new ones for each batch.")


def _conclude(corpus: ParallelCorpus, result: Result, out: Path) -> None:
    typer.echo(summary(result, out))
    if "bleu" in result.best:
        typer.echo(f"Best validation BLEU: {result.best['bleu']:.1f}, perplexity {result.best['ppl']:.2f}")
    elif result.best:
        typer.echo(f"Best validation perplexity: {result.best['ppl']:.2f}")
    folder = shlex.quote(str(out))
    split = "test" if "test" in corpus.splits else "valid"
    example = shlex.quote(corpus.split("valid").sources[0])
    typer.echo("Next:")
    typer.echo(f"  fastweights eval mt {folder} --split {split}")
    typer.echo(f"  echo {example} | fastweights translate {folder}")


def _corpus(folder: Path, prepare_it: bool) -> ParallelCorpus:
    from fastweights.data.pairs.corpus import ParallelCorpus

    if prepare_it:
        prepare_once("numbers", "number words in English and German", folder)
    return ParallelCorpus.load(folder)
