"""`fastweights train lm`: a language model from a preset, a corpus and whatever should differ."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastweights.commands.train_mt import mt
from fastweights.commands.training_options import (
    PRECISIONS,
    Accumulate,
    CheckpointEvery,
    Compile,
    Devices,
    EvalEvery,
    Fresh,
    Graph,
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
from fastweights.data.manifest import EMBEDDED

if TYPE_CHECKING:
    from fastweights.data.text.corpus import Corpus
    from fastweights.training.engine.loop import Result
    from fastweights.training.tasks.language import LanguageTask

app = typer.Typer(help="Train a model; the same command goes on with a run that was stopped.", no_args_is_help=True)
app.command()(mt)


@app.command()
def lm(
    preset: Annotated[
        str, typer.Option(help="small, small-fast, medium or tiny: sizes and recipe; see models/presets.py.")
    ],
    mixer: Annotated[str, typer.Option(help="delta, linear, performer, dpfp, transformer or xl.")] = "delta",
    data: Annotated[
        Path | None, typer.Option(help="A prepared corpus.", show_default=f"{EMBEDDED}, prepared on first use")
    ] = None,
    rule: Annotated[str | None, own("Update rule: sum, delta, gated, gated_delta, ...", "the mixer's")] = None,
    nu: Annotated[int | None, own("dpfp: its parameter ν.", "1")] = None,
    features: Annotated[int | None, own("performer: its number m of random features.", "d_head / 2")] = None,
    normalization: Annotated[str | None, own("none, sum, attention, both or l2.", "the rule's")] = None,
    positions: Annotated[str | None, own("none or sinusoid.", "sinusoid with limited context")] = None,
    context: Annotated[
        str | None, own("limited: each segment alone; carried: its state goes on.", "limited, xl carried")
    ] = None,
    documents: Annotated[
        str | None, own("Where a carried state is emptied: none, articles or paragraphs.", "none")
    ] = None,
    out: Annotated[Path | None, own("Folder of the run.", "runs/PRESET-MIXER")] = None,
    steps: Steps = None,
    batch: Annotated[int | None, own("Segments in a batch, over all devices.")] = None,
    length: Annotated[int | None, own("Words in a segment.")] = None,
    lr: Rate = None,
    warmup: Warmup = None,
    seed: Seed = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    devices: Devices = None,
    strategy: Strategy = None,
    compile: Compile = None,
    graph: Graph = False,
    minutes: Minutes = None,
    eval_every: EvalEvery = None,
    checkpoint_every: CheckpointEvery = None,
    fresh: Fresh = False,
    settings: Settings = None,
) -> None:
    """Train a language model, log and validate it, and keep its best and last checkpoints in a folder.

    Ctrl-C saves and stops; the same command goes on from there. Without --data it learns from the documentation that
    comes with Python, which needs no download.
    """
    with interruptible():
        with input_errors(ValueError, TypeError):
            from fastweights.training.runs.saved import keep_vocabulary
            from fastweights.training.tasks.language import FIELDS, assemble

            given: dict[str, Any] = {"steps": steps, "batch_size": batch, "segment": length, "lr": lr}
            given |= {"warmup": warmup, "seed": seed, "precision": PRECISIONS.get(str(precision), precision)}
            given |= {"accumulate": accumulate, "devices": parse_devices(devices), "strategy": strategy}
            given |= {"compile": compile, "eval_every": eval_every, "checkpoint_every": checkpoint_every}
            given |= {
                "graph": graph or None,
                "normalization": normalization,
                "positions": positions,
                "documents": documents,
            }
            chosen = read_settings(FIELDS, settings or [], given)
            _check_names(preset, mixer)
            _map_options(chosen, mixer, nu, features)
            check_minutes(minutes)
            where = EMBEDDED if data is None else data
            corpus = _corpus(where, prepare_it=data is None)
            choice: dict[str, Any] = {"preset": preset, "mixer": mixer, "rule": rule, "context": context}
            task, config = assemble(corpus, **choice, **chosen)
            out = Path("runs") / "-".join(filter(None, (preset, mixer, rule, context))) if out is None else out
        _announce(task, corpus, out)
        # Absolute: the run may be used from another folder than the one it was started in.
        about = {"data": str(where.resolve()), "corpus": corpus.manifest["name"]}
        kept = lambda: keep_vocabulary(out, corpus.vocabulary, fresh)  # noqa: E731
        result = run_training(task, config, out, about=about, keep=kept, fresh=fresh, minutes=minutes)
    if first_process():
        _conclude(task, result, out)


def _announce(task: LanguageTask, corpus: Corpus, out: Path) -> None:
    if first_process():
        words = f"{len(corpus.train):,} {corpus.vocabulary.kind} of {corpus.manifest['name']}"
        reading = f"{task.batch_size} segments of {task.segment}, context {task.context}"
        say(f"{task.n_parameters / 1e6:.2f} M parameters, {words} in {reading}; the run is kept in {out}")


def _conclude(task: LanguageTask, result: Result, out: Path) -> None:
    typer.echo(summary(result, out))
    if result.best:
        how = f"segments of {task.segment} in {task.eval_batch} rows"
        typer.echo(f"Best validation perplexity: {result.best['ppl']:.2f} ({how})")
    folder = shlex.quote(str(out))
    typer.echo("Next:")
    typer.echo(f"  fastweights eval lm {folder} --split test --protocol {'carried' if task.carried else 'sliding'}")
    typer.echo(f'  fastweights generate {folder} --prompt "The" --tokens 50')


def _check_names(preset: str, mixer: str) -> None:
    """Before a corpus is prepared for a model that there is not."""
    from fastweights.common.tables import look_up
    from fastweights.models.presets import MIXER_CHOICES, PRESETS

    look_up(PRESETS, preset, "preset")
    look_up(MIXER_CHOICES, mixer, "mixer")


def _map_options(chosen: dict[str, Any], mixer: str, nu: int | None, features: int | None) -> None:
    """Enter --nu and --features as the options of the feature map that has them."""
    from fastweights.models.presets import MIXER_CHOICES

    phi = chosen.get("feature_map", MIXER_CHOICES[mixer].feature_map)
    for option, owner, name, value in (("--nu", "dpfp", "nu", nu), ("--features", "favor", "m", features)):
        if value is None:
            continue
        if phi != owner:
            has = f"has feature map {phi!r}" if phi else "has no feature map"
            user = next(kind for kind, choice in MIXER_CHOICES.items() if choice.feature_map == owner)
            raise ValueError(f"{option} is for mixer {user!r}; mixer {mixer!r} {has}")
        chosen["feature_map_options"] = {**chosen.get("feature_map_options", {}), name: value}


def _corpus(folder: Path, prepare_it: bool) -> Corpus:
    from fastweights.data.text.corpus import Corpus

    if prepare_it:
        prepare_once("embedded", "the documentation of Python", folder)
    return Corpus.load(folder)
