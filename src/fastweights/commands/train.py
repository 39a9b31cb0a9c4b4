"""`fastweights train lm` and `train mt`: a model from a preset, a corpus and whatever should differ."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fastweights.commands.options import PRECISIONS, input_errors, read_settings, require, say
from fastweights.common import provenance
from fastweights.common.tables import look_up
from fastweights.data.manifest import EMBEDDED, NUMBERS
from fastweights.data.pairs.bpe import Tokenizer
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.data.text.corpus import Corpus
from fastweights.data.text.documents import DOCUMENTS
from fastweights.data.text.vocabulary import Vocabulary
from fastweights.models.language_model import NAMES
from fastweights.models.presets import MIXER_CHOICES, PRESETS
from fastweights.models.translation_config import ATTENTIONS
from fastweights.models.translation_presets import PRESETS as MT_PRESETS
from fastweights.ops.rules import RULES
from fastweights.training.engine.config import COMPILE_MODES, STRATEGIES, TrainingConfig
from fastweights.training.engine.diagnosis import Diverged
from fastweights.training.engine.loop import Result, train
from fastweights.training.engine.task import Task
from fastweights.training.runs.checkpoint import CheckpointError
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.saved import keep_vocabulary
from fastweights.training.tasks.language import FIELDS, assemble
from fastweights.training.tasks.translation import FIELDS as MT_FIELDS
from fastweights.training.tasks.translation import assemble_translation, plan_translation

# Options with these names are settings as they are.
SHARED = {field.name for field in fields(TrainingConfig)}


def own(help: str, default: str = "the preset's") -> Any:
    """Return an option whose default is decided elsewhere."""
    return typer.Option(help=help, show_default=default)


def describe(presets: Mapping[str, Callable[..., Any]]) -> str:
    """Return the help of --preset: each by the first line of its docstring."""
    lines = ((name, *(preset.__doc__ or "").splitlines()) for name, preset in presets.items())
    return "Sizes and recipe. " + " ".join(": ".join(line[:2]) for line in lines)


Steps = Annotated[int | None, own("Updates of the weights.")]
Rate = Annotated[float | None, own("Learning rate after the warm-up.")]
Warmup = Annotated[int | None, own("Updates of warm-up.")]
Seed = Annotated[int | None, own("Seed of initial weights, dropout and the order of batches.", "1111")]
Precision = Annotated[str | None, own(f"One of {', '.join(PRECISIONS)}; bf16 is bf16-mixed.", "fp32")]
Accumulate = Annotated[int | None, own("Batches in an update.")]
Devices = Annotated[str | None, own("Number of devices, or auto for one or what torchrun started.", "auto")]
Strategy = Annotated[str | None, own(f"One of {', '.join(STRATEGIES)}.", "auto")]
Compile = Annotated[str | None, own(f"Mode of torch.compile: {', '.join(COMPILE_MODES)}.", "not compiled")]
Graph = Annotated[bool, typer.Option("--graph", help="Capture updates as CUDA graphs; one process, one GPU.")]
Minutes = Annotated[float | None, own("Save and stop after this long; the same command resumes the run.", "no limit")]
EvalEvery = Annotated[int | None, own("Updates between validations.", "a tenth of them, or fewer")]
CheckpointEvery = Annotated[int | None, own("Updates between checkpoints.", "every ten minutes")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew; a run in the folder is moved aside.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field of model or training, VALUE as in JSON; an unknown FIELD lists those there are.",
    ),
]


def lm(
    preset: Annotated[str, typer.Option(help=describe(PRESETS))],
    mixer: Annotated[str, typer.Option(help=f"Sequence layer: {', '.join(MIXER_CHOICES)}.")] = "delta",
    data: Annotated[
        Path | None, typer.Option(help="A prepared corpus.", show_default=f"{EMBEDDED}, prepared on first use")
    ] = None,
    rule: Annotated[str | None, own(f"Update rule: {', '.join(RULES)}.", "the mixer's")] = None,
    nu: Annotated[int | None, own("dpfp: its parameter ν.", "1")] = None,
    features: Annotated[int | None, own("performer: its number m of random features.", "d_head / 2")] = None,
    normalization: Annotated[str | None, own(f"One of {', '.join(NAMES['normalization'])}.", "the rule's")] = None,
    positions: Annotated[
        str | None, own(f"One of {', '.join(NAMES['positions'])}.", "sinusoid with limited context")
    ] = None,
    context: Annotated[
        str | None,
        own("limited: each segment stands alone; carried: it continues from the one before.", "limited, xl carried"),
    ] = None,
    documents: Annotated[str | None, own(f"Where a carried state is emptied: {', '.join(DOCUMENTS)}.", "none")] = None,
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

    Ctrl-C saves and stops; the same command resumes the run. Without --data it learns from the documentation that
    comes with Python, which needs no download.
    """
    options = {name: value for name, value in locals().items() if name in SHARED}
    with interruptible():
        with input_errors():
            require("lightning")
            options |= {
                "batch_size": batch,
                "segment": length,
                "graph": graph or None,
                "devices": parse_devices(devices),
            }
            options |= {"normalization": normalization, "positions": positions, "documents": documents}
            chosen = read_settings(FIELDS, settings or [], options)
            # Before a corpus is prepared for a model that cannot be.
            look_up(PRESETS, preset, "preset")
            look_up(MIXER_CHOICES, mixer, "mixer")
            set_map_options(chosen, mixer, nu, features)
            check_minutes(minutes)
            if data is None:
                prepare_once("embedded", "the documentation of Python", EMBEDDED)
            corpus = Corpus.load(data or EMBEDDED)
            choice: dict[str, Any] = {"preset": preset, "mixer": mixer, "rule": rule, "context": context}
            task, config = assemble(corpus, **choice, **chosen)
            out = out or Path("runs") / "-".join(filter(None, (preset, mixer, rule, context)))
        words = f"{len(corpus.train):,} {corpus.vocabulary.kind} of {corpus.manifest['name']}"
        announce(task, f"{words} in {task.batch_size} segments of {task.segment}, context {task.context}", out)
        result = run_training(task, config, out, corpus, corpus.vocabulary, fresh, minutes)
    rows = f" (segments of {task.segment} in {task.eval_batch} rows)"
    folder, protocol = shlex.quote(str(out)), " --protocol carried" if task.carried else ""
    conclude(
        result,
        out,
        f"perplexity {result.best['ppl']:.2f}{rows}" if result.best else "",
        f"fastweights eval lm {folder} --split test{protocol}",
        f'fastweights generate {folder} --prompt "The" --tokens 50',
    )


def mt(
    preset: Annotated[str, typer.Option(help=describe(MT_PRESETS))],
    attention: Annotated[
        str, typer.Option(help=f"Attention wherever no other is chosen: {', '.join(ATTENTIONS)}.")
    ] = "softmax",
    data: Annotated[
        Path | None, typer.Option(help="Prepared pairs.", show_default=f"{NUMBERS}, prepared on first use")
    ] = None,
    encoder: Annotated[str | None, own("Attention within the source.", "--attention")] = None,
    decoder: Annotated[str | None, own("Attention of the target to its past.", "--attention")] = None,
    cross: Annotated[str | None, own("Attention of the target to the source.", "--attention")] = None,
    features: Annotated[int | None, own("performer: its number m of random features.", "4 d_head")] = None,
    nu: Annotated[int | None, own("dpfp: its parameter ν.", "2")] = None,
    rule: Annotated[str | None, own(f"Update rule of the decoder's fast weights: {', '.join(RULES)}.", "sum")] = None,
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

    Ctrl-C saves and stops; the same command resumes the run. Without --data it learns to translate English number
    words to German ones, which needs no download.
    """
    options = {name: value for name, value in locals().items() if name in SHARED}
    with interruptible():
        with input_errors():
            places = {"encoder": encoder, "decoder": decoder, "cross": cross}
            options |= {**places, "features": features, "nu": nu, "rule": rule, "max_tokens": tokens}
            chosen = read_settings(MT_FIELDS, settings or [], options | {"devices": parse_devices(devices)})
            scoring = ["sacrebleu"] if chosen.get("bleu_sentences", 1) else []
            require("lightning", "tokenizers", *scoring, *([] if data else ["num2words"]))
            check_minutes(minutes)
            # Before a corpus is prepared for a model that cannot be.
            plan_translation(1, preset=preset, attention=attention, **chosen)
            if data is None:
                prepare_once("numbers", "number words in English and German", NUMBERS)
            corpus = ParallelCorpus.load(data or NUMBERS)
            task, config = assemble_translation(corpus, preset=preset, attention=attention, **chosen)
            others = (f"{place}_{name}" for place, name in places.items() if name not in (None, attention))
            out = out or Path("runs") / "-".join(filter(None, ("mt", preset, attention, *others, rule)))
        pairs = f"{len(corpus.split('train')):,} pairs of {corpus.manifest['name']}"
        long = f", {task.left_out:,} of them too long" if task.left_out else ""
        announce(task, f"{pairs}{long}, {task.batches_per_epoch:,} batches an epoch", out)
        if "performer" in task.model.attentions and not task.model.redraw and first_process():
            say("The Performer keeps its random features as first drawn; --set redraw=true draws new ones each batch.")
        result = run_training(task, config, out, corpus, corpus.tokenizer, fresh, minutes)
    scores = [f"BLEU {result.best['bleu']:.1f}"] if "bleu" in result.best else []
    scores += [f"perplexity {result.best['ppl']:.2f}"] if result.best else []
    folder, split = shlex.quote(str(out)), "test" if "test" in corpus.splits else "valid"
    conclude(
        result,
        out,
        ", ".join(scores),
        f"fastweights eval mt {folder} --split {split}",
        f"echo {shlex.quote(corpus.split('valid').sources[0])} | fastweights translate {folder}",
    )


def set_map_options(chosen: dict[str, Any], mixer: str, nu: int | None, features: int | None) -> None:
    """Enter --nu and --features as the options of the feature map that has them."""
    phi = chosen.get("feature_map", MIXER_CHOICES[mixer].feature_map)
    for option, owner, name, value in (("--nu", "dpfp", "nu", nu), ("--features", "favor", "m", features)):
        if value is None:
            continue
        if phi != owner:
            has = f"has feature map {phi!r}" if phi else "has no feature map"
            user = next(kind for kind, choice in MIXER_CHOICES.items() if choice.feature_map == owner)
            raise ValueError(f"{option} is for mixer {user!r}; mixer {mixer!r} {has}")
        chosen["feature_map_options"] = {**chosen.get("feature_map_options", {}), name: value}


def parse_devices(text: str | None) -> int | str | None:
    """Return the value of --devices."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--devices must be a number of at least 1, or auto, got {text!r}")
    return int(text)


def check_minutes(minutes: float | None) -> None:
    """Raise a ValueError for a time in which nothing could begin."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {minutes:g}")


def prepare_once(kind: str, what: str, folder: Path) -> None:
    """Prepare a corpus that needs no download where it is not there yet."""
    if not (folder / "manifest.json").exists() and first_process():
        say(f"Preparing {what} as a corpus in {folder}")
    prepare(kind, None, folder)


def announce(task: Any, reading: str, out: Path) -> None:
    """Say what will be trained on what, and where."""
    if first_process():
        say(f"{task.n_parameters / 1e6:.2f} M parameters, {reading}; the run is kept in {out}")


def run_training(
    task: Task,
    config: TrainingConfig,
    out: Path,
    corpus: Corpus | ParallelCorpus,
    vocabulary: Vocabulary | Tokenizer,
    fresh: bool,
    minutes: float | None,
) -> Result:
    """Train with progress on the terminal; what goes wrong ends the command with a sentence and an exit code."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Absolute: the run may be used from another folder than the one it was started in.
    about: dict[str, Any] = {"data": str(corpus.folder.resolve()), "corpus": corpus.manifest["name"]}
    about |= {"commit": provenance.commit(), "hardware": provenance.hardware(device)}
    about |= {"versions": provenance.versions(), "command": shlex.join(["fastweights", *sys.argv[1:]])}
    try:
        with input_errors((ValueError, ImportError)):
            keep_vocabulary(out, vocabulary, fresh)
            return train(task, config, out, fresh=fresh, minutes=minutes, about=about, console=Console(stderr=True))
    except RunError as error:
        say(f"Error: {error}" + ("" if fresh else "\n--fresh starts anew, --out chooses another folder"))
        raise typer.Exit(2) from None
    except (CheckpointError, Diverged) as error:
        say(f"Error: {error}")
        raise typer.Exit(1) from None


def conclude(result: Result, out: Path, best: str, *commands: str) -> None:
    """Say where the run stands, how good its best model is, and what can be done with it."""
    if not first_process():
        return
    state = "finished" if result.finished else "not finished; the same command resumes it"
    typer.echo(f"Run: {out} at step {result.step} ({state}), {result.wall_s:.0f} s of training")
    if best:
        typer.echo(f"Best validation {best}")
    typer.echo("Next:")
    for command in commands:
        typer.echo(f"  {command}")


def first_process() -> bool:
    """Return whether this process is the one that speaks; torchrun and Lightning number them in the environment."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))


@contextmanager
def interruptible() -> Iterator[None]:
    """End the command with exit code 130 on Ctrl-C outside of the training loop, which has its own."""
    try:
        yield
    except KeyboardInterrupt:
        say("Stopped; what was saved stays, and the same command resumes from it.")
        raise typer.Exit(130) from None
