"""`fastweights train lm` and `train mt`: a model from a preset, a corpus and whatever should differ."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fastweights.commands.options import (
    PRECISIONS,
    flag,
    input_errors,
    interruptible,
    option,
    read_settings,
    require,
    say,
    type_name,
    with_fields_as_options,
)
from fastweights.common.provenance import origin
from fastweights.common.tables import look_up
from fastweights.data.manifest import EMBEDDED, NUMBERS
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.data.text.corpus import Corpus
from fastweights.data.text.documents import DOCUMENTS
from fastweights.models.language_model import NAMES
from fastweights.models.presets import MIXER_CHOICES, PRESETS, RECIPES, SIZES
from fastweights.models.translation_config import ATTENTIONS
from fastweights.models.translation_presets import PRESETS as MT_PRESETS
from fastweights.models.translation_presets import RECIPES as MT_RECIPES
from fastweights.ops.rules import RULES
from fastweights.training.engine.config import COMPILE_MODES, STRATEGIES, Fields, TrainingConfig
from fastweights.training.engine.diagnosis import Diverged
from fastweights.training.engine.loop import Result, train
from fastweights.training.engine.task import Task
from fastweights.training.runs.checkpoint import CheckpointError
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.saved import keep_tokenizer
from fastweights.training.tasks.language import FIELDS, assemble
from fastweights.training.tasks.translation import FIELDS as MT_FIELDS
from fastweights.training.tasks.translation import assemble_translation, plan_translation

# Where Python's documentation is prepared in byte pairs.
PIECES = EMBEDDED.with_name("embedded-bpe")
# On Ctrl-C outside of the training loop, which has its own answer to it.
STOPPED = "Stopped; what was saved stays, and the same command resumes from it."


def field(help: str, default: str = "the preset's") -> Any:
    """Return the option for a field of a model or its training, and say who decides its default."""
    return option(help, default)


def preset_option(presets: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the option --preset."""
    return option(f"Sizes and recipe: {', '.join(presets)}; --list describes them.")


def list_option(
    presets: Mapping[str, Callable[..., Any]], recipes: Mapping[str, Mapping[str, Any]], known: Fields
) -> Any:
    """Return the option --list, which shows the presets and the fields of --set."""

    def show(wanted: bool) -> None:
        if not wanted:
            return
        typer.echo("Presets:")
        for name, preset in presets.items():
            typer.echo(f"  {name:<12} {(preset.__doc__ or '').splitlines()[0]}")
            typer.echo(f"{'':<15}{', '.join(f'{field} {value}' for field, value in recipes[name].items())}")
        for what, names in {"the model": known.model, "the task": known.task, "training": known.training}.items():
            typer.echo(f"Fields of {what} for --set, with their types:")
            for name in names:
                typer.echo(f"  {name:<20} {type_name(known.types()[name])}")
        raise typer.Exit

    return typer.Option("--list", callback=show, is_eager=True, help="Show the presets and the fields of --set.")


@dataclass(frozen=True)
class TrainingOptions:
    """The options that `train lm` and `train mt` share."""

    steps: Annotated[int | None, field("Updates of the weights.")] = None
    lr: Annotated[float | None, field("Learning rate after the warm-up.")] = None
    warmup: Annotated[int | None, field("Updates of warm-up.")] = None
    seed: Annotated[int | None, field("Seed of initial weights, dropout and the order of batches.", "1111")] = None
    precision: Annotated[str | None, field(f"One of {', '.join(PRECISIONS)}; bf16 is bf16-mixed.", "fp32")] = None
    accumulate: Annotated[int | None, field("Batches in an update.")] = None
    devices: Annotated[str | None, field("Number of devices, or auto for one or what torchrun started.", "auto")] = None
    strategy: Annotated[str | None, field(f"One of {', '.join(STRATEGIES)}.", "auto")] = None
    compile: Annotated[str | None, field(f"Mode of torch.compile: {', '.join(COMPILE_MODES)}.", "not compiled")] = None
    graph: Annotated[bool, flag("graph", "Capture updates as CUDA graphs; one process, one GPU.")] = False
    minutes: Annotated[
        float | None, field("Save and stop after this long; the same command resumes the run.", "no limit")
    ] = None
    eval_every: Annotated[int | None, field("Updates between validations.", "a tenth of them, or fewer")] = None
    checkpoint_every: Annotated[int | None, field("Updates between checkpoints.", "every ten minutes")] = None
    fresh: Annotated[bool, flag("fresh", "Start a new run; an existing run in the folder is moved aside.")] = False
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Any field of model or training, VALUE as in JSON; --list shows the fields.",
        ),
    ] = None

    def chosen(self, known: Fields, **more: Any) -> dict[str, Any]:
        """Return the fields of model and training that were set, by these options, by `more` of them or by --set."""
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"--minutes must be above 0, got {self.minutes:g}")
        trained = {each.name for each in fields(TrainingConfig)}
        options = {name: value for name, value in vars(self).items() if name in trained}
        options |= {"devices": parse_devices(self.devices), "graph": self.graph or None}
        return read_settings(known, self.settings or [], {**options, **more})


@with_fields_as_options
def lm(
    preset: Annotated[str, preset_option(PRESETS)] = "quick",
    mixer: Annotated[str, option(f"Sequence layer: {', '.join(MIXER_CHOICES)}.")] = "delta",
    data: Annotated[
        Path | None, field("A prepared corpus.", f"{PIECES} for quick, {EMBEDDED} for others, prepared on first use")
    ] = None,
    rule: Annotated[str | None, field(f"Update rule: {', '.join(RULES)}.", "the mixer's")] = None,
    nu: Annotated[int | None, field("dpfp: parameter ν.", "1")] = None,
    features: Annotated[int | None, field("performer: number m of random features.", "d_head / 2")] = None,
    normalization: Annotated[str | None, field(f"One of {', '.join(NAMES['normalization'])}.", "the rule's")] = None,
    positions: Annotated[
        str | None,
        field(f"One of {', '.join(NAMES['positions'])}.", "none for quick, else sinusoid with limited context"),
    ] = None,
    context: Annotated[
        str | None,
        field(
            "limited: each segment starts with an empty memory; carried: it continues from the previous one.",
            "carried for quick and xl, else limited",
        ),
    ] = None,
    documents: Annotated[
        str | None, field(f"carried: where the memory is emptied: {', '.join(DOCUMENTS)}.", "none")
    ] = None,
    out: Annotated[Path | None, field("Folder of the run.", "runs/PRESET-MIXER")] = None,
    batch: Annotated[int | None, field("Segments in a batch, over all devices.")] = None,
    length: Annotated[int | None, field("Tokens in a segment.")] = None,
    list_: Annotated[bool, list_option(PRESETS, RECIPES, FIELDS)] = False,
    *,
    training: TrainingOptions,
) -> None:
    """Train a language model, log and validate it, and keep its best and last checkpoints in a folder.

    Without options it trains a small model that reads text of any length in constant memory, in minutes on two CPU
    cores, from the documentation that comes with Python; nothing is downloaded. Ctrl-C saves and stops; the same
    command resumes the run.
    """
    with interruptible(STOPPED):
        with input_errors():
            require("lightning_fabric")
            batches = {"batch_size": batch, "segment": length, "documents": documents}
            model = {"normalization": normalization, "positions": positions}
            chosen = training.chosen(FIELDS, **batches, **model)
            # Before a corpus is prepared for a model that cannot be.
            look_up(PRESETS, preset, "preset")
            look_up(MIXER_CHOICES, mixer, "mixer")
            set_map_options(chosen, mixer, nu, features)
            corpus = Corpus.load(data or prepare_documentation(preset))
            choice: dict[str, Any] = {"preset": preset, "mixer": mixer, "rule": rule, "context": context}
            task, config = assemble(corpus, **choice, **chosen)
            out = out or Path("runs") / "-".join(filter(None, (preset, mixer, rule, context)))
        words = f"{len(corpus.train):,} {corpus.tokenizer.unit}s of {corpus.manifest['name']}"
        cut = f"in batches of {task.batch_size} segments of {task.segment}, context {task.context}"
        announce(task, f"{words}, {cut}", out)
        result = run_training(task, config, out, corpus, training)
    rows = f" (segments of {task.segment} in {task.eval_batch} rows)"
    run = shlex.quote(str(out))
    conclude(
        result,
        out,
        f"perplexity {result.best['ppl']:.2f}{rows}" if result.best else "",
        f"fastweights eval lm {run} --split test",
        f'fastweights generate {run} --prompt "The" --temperature 0.7',
    )


@with_fields_as_options
def mt(
    preset: Annotated[str, preset_option(MT_PRESETS)] = "quick",
    attention: Annotated[
        str | None,
        field(
            f"Attention everywhere, unless an option below says otherwise: {', '.join(ATTENTIONS)}.",
            "linear for quick, softmax for others",
        ),
    ] = None,
    data: Annotated[Path | None, field("Prepared pairs.", f"{NUMBERS}, prepared on first use")] = None,
    encoder: Annotated[str | None, field("Attention within the source.", "--attention")] = None,
    decoder: Annotated[str | None, field("Attention from the target to its past.", "--attention")] = None,
    cross: Annotated[str | None, field("Attention from the target to the source.", "--attention")] = None,
    features: Annotated[int | None, field("performer: number m of random features.", "4 d_head")] = None,
    nu: Annotated[int | None, field("dpfp: parameter ν.", "2")] = None,
    rule: Annotated[str | None, field(f"Update rule of the decoder's fast weights: {', '.join(RULES)}.", "sum")] = None,
    out: Annotated[Path | None, field("Folder of the run.", "runs/mt-PRESET-ATTENTION")] = None,
    tokens: Annotated[
        int | None, field("Tokens in a batch on either side, including padding, over all devices.")
    ] = None,
    list_: Annotated[bool, list_option(MT_PRESETS, MT_RECIPES, MT_FIELDS)] = False,
    *,
    training: TrainingOptions,
) -> None:
    """Train a translation model, validate it by BLEU, and keep its best and last checkpoints in a folder.

    Without options it learns to translate English number words to German ones, in minutes on two CPU cores; nothing is
    downloaded. Ctrl-C saves and stops; the same command resumes the run.
    """
    with interruptible(STOPPED):
        with input_errors():
            attention = attention or ("linear" if preset == "quick" else "softmax")
            attentions = {"encoder": encoder, "decoder": decoder, "cross": cross}
            chosen = training.chosen(MT_FIELDS, **attentions, features=features, nu=nu, rule=rule, max_tokens=tokens)
            scoring = ["sacrebleu"] if chosen.get("bleu_sentences", 1) else []
            require("lightning_fabric", *scoring, *([] if data else ["num2words"]))
            # Before a corpus is prepared for a model that cannot be.
            plan_translation(1, preset=preset, attention=attention, **chosen)
            folder = data or prepare_once("numbers", "number words in English and German", NUMBERS)
            corpus = ParallelCorpus.load(folder)
            task, config = assemble_translation(corpus, preset=preset, attention=attention, **chosen)
            others = (f"{place}_{name}" for place, name in attentions.items() if name not in (None, attention))
            out = out or Path("runs") / "-".join(filter(None, ("mt", preset, attention, *others, rule)))
        pairs = f"{len(corpus.split('train')):,} pairs of {corpus.manifest['name']}"
        long = f", {task.left_out:,} of them too long" if task.left_out else ""
        announce(task, f"{pairs}{long}, {task.batches_per_epoch:,} batches per epoch", out)
        if "performer" in task.model.attentions and not task.model.redraw and first_process():
            say("The Performer keeps its random features as first drawn; --set redraw=true draws new ones each batch.")
        result = run_training(task, config, out, corpus, training)
    scores = [f"BLEU {result.best['bleu']:.1f}"] if "bleu" in result.best else []
    scores += [f"perplexity {result.best['ppl']:.2f}"] if result.best else []
    run, split = shlex.quote(str(out)), "test" if "test" in corpus.splits else "valid"
    conclude(
        result,
        out,
        ", ".join(scores),
        f"fastweights eval mt {run} --split {split}",
        f"echo {shlex.quote(corpus.split('valid').sources[0])} | fastweights translate {run}",
    )


def set_map_options(chosen: dict[str, Any], mixer: str, nu: int | None, features: int | None) -> None:
    """Store --nu and --features as options of the feature map that they belong to."""
    phi = chosen.get("feature_map", MIXER_CHOICES[mixer].feature_map)
    for asked, owner, name, value in (("--nu", "dpfp", "nu", nu), ("--features", "favor", "m", features)):
        if value is None:
            continue
        if phi != owner:
            has = f"has feature map {phi!r}" if phi else "has no feature map"
            user = next(kind for kind, choice in MIXER_CHOICES.items() if choice.feature_map == owner)
            raise ValueError(f"{asked} is for mixer {user!r}; mixer {mixer!r} {has}")
        chosen["feature_map_options"] = {**chosen.get("feature_map_options", {}), name: value}


def parse_devices(text: str | None) -> int | str | None:
    """Return the value of --devices."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--devices must be a number of at least 1, or auto, got {text!r}")
    return int(text)


def prepare_once(kind: str, what: str, folder: Path, **options: Any) -> Path:
    """Prepare a corpus that needs no download, unless it is prepared already, and return its folder."""
    if not (folder / "manifest.json").exists() and first_process():
        say(f"Preparing {what} as a corpus in {folder}")
    prepare(kind, None, folder, **options)
    return folder


def prepare_documentation(preset: str) -> Path:
    """Prepare Python's documentation for a preset: in byte pairs for `quick`, in words for the paper's models."""
    what = "the documentation of Python"
    if preset != "quick":
        return prepare_once("embedded", what, EMBEDDED)
    return prepare_once("embedded", what, PIECES, tokens="bpe", vocabulary_size=SIZES[preset]["vocab_size"])


def announce(task: Any, data: str, out: Path) -> None:
    """Say what will be trained on what, and where."""
    if first_process():
        say(f"Training {task.n_parameters / 1e6:.2f} M parameters on {data}; the run is in {out}")


def run_training(
    task: Task, config: TrainingConfig, out: Path, corpus: Corpus | ParallelCorpus, options: TrainingOptions
) -> Result:
    """Train with progress on the terminal; what goes wrong ends the command with a sentence and an exit code."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Absolute: the run may be used from another folder than the one it was started in.
    about: dict[str, Any] = {"data": str(corpus.folder.resolve()), "corpus": corpus.manifest["name"]}
    about |= {**origin(device), "command": shlex.join(["fastweights", *sys.argv[1:]])}
    try:
        with input_errors((ValueError, ImportError)):
            keep_tokenizer(out, corpus.tokenizer, options.fresh)
            how: dict[str, Any] = {"fresh": options.fresh, "minutes": options.minutes, "about": about}
            return train(task, config, out, **how, console=Console(stderr=True))
    except RunError as error:
        say(f"Error: {error}" + ("" if options.fresh else "\n--fresh starts anew, --out chooses another folder"))
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
    """Return whether this process prints messages; torchrun and Lightning number processes in the environment."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
