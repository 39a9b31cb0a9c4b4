"""`fastweights train lm`: a language model from a preset, a corpus and whatever should differ."""

from __future__ import annotations

import json
import os
import shlex
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer

if TYPE_CHECKING:
    from fastweights.data.tokens import Corpus
    from fastweights.training.language import LanguageTask
    from fastweights.training.loop import Result
    from fastweights.training.settings import Fields

EMBEDDED = Path("data") / "embedded"
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}

app = typer.Typer(help="Train a model; the same command goes on with a run that was stopped.", no_args_is_help=True)


@app.callback()
def _train() -> None:
    """Keeps `lm` a word of the command line while it is the only thing to train."""


def _own(help: str, default: str = "the preset's") -> Any:
    return typer.Option(help=help, show_default=default)


@app.command()
def lm(
    preset: Annotated[str, typer.Option(help="small, medium or tiny: sizes and recipe; see models/presets.py.")],
    mixer: Annotated[str, typer.Option(help="delta, linear, performer, dpfp, transformer or xl.")] = "delta",
    data: Annotated[
        Path | None, typer.Option(help="A prepared corpus.", show_default=f"{EMBEDDED}, prepared on first use")
    ] = None,
    rule: Annotated[str | None, _own("Update rule: sum, delta, gated, gated_delta, ...", "the mixer's")] = None,
    nu: Annotated[int | None, _own("dpfp: its parameter ν.", "1")] = None,
    features: Annotated[int | None, _own("performer: its number m of random features.", "d_head / 2")] = None,
    normalization: Annotated[str | None, _own("none, sum, attention, both or l2.", "the rule's")] = None,
    positions: Annotated[str | None, _own("none or sinusoid.", "sinusoid with limited context")] = None,
    context: Annotated[
        str | None, _own("limited: each segment alone; carried: its state goes on.", "limited, xl carried")
    ] = None,
    out: Annotated[Path | None, _own("Folder of the run.", "runs/PRESET-MIXER")] = None,
    steps: Annotated[int | None, _own("Updates of the weights.")] = None,
    batch: Annotated[int | None, _own("Segments in a batch, over all devices.")] = None,
    length: Annotated[int | None, _own("Words in a segment.")] = None,
    lr: Annotated[float | None, _own("Learning rate after the warm-up.")] = None,
    warmup: Annotated[int | None, _own("Updates of warm-up.")] = None,
    seed: Annotated[int | None, _own("Of initial weights and dropout.", "1111")] = None,
    precision: Annotated[str | None, _own("fp32, bf16 (mixed), bf16-true or 64-true.", "fp32")] = None,
    accumulate: Annotated[int | None, _own("Batches in an update.", "1")] = None,
    devices: Annotated[str | None, _own("Number of devices, or auto for one or what torchrun started.", "auto")] = None,
    strategy: Annotated[str | None, _own("auto, single, ddp or fsdp.", "auto")] = None,
    compile: Annotated[str | None, _own("Mode of torch.compile: default, reduce-overhead, ...", "not compiled")] = None,
    minutes: Annotated[float | None, _own("Stop after so long, saved, to be gone on with.", "no limit")] = None,
    eval_every: Annotated[int | None, _own("Updates between validations.", "a tenth, at most 4000")] = None,
    checkpoint_every: Annotated[int | None, _own("Updates between checkpoints.", "every ten minutes")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; a run in the folder is moved aside.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any field of model or training, VALUE as in JSON."),
    ] = None,
) -> None:
    """Train a language model, log and validate it, and keep its best and last checkpoints in a folder.

    Ctrl-C saves and stops; the same command goes on from there. Without --data it learns from the documentation that
    comes with Python, which needs no download.
    """
    try:
        with input_errors(ValueError, TypeError):
            from fastweights.training.language import FIELDS, assemble

            given: dict[str, Any] = {"steps": steps, "batch_size": batch, "segment": length, "lr": lr}
            given |= {"warmup": warmup, "seed": seed, "precision": PRECISIONS.get(str(precision), precision)}
            given |= {"accumulate": accumulate, "devices": _devices(devices), "strategy": strategy}
            given |= {"compile": compile, "eval_every": eval_every, "checkpoint_every": checkpoint_every}
            given |= {"normalization": normalization, "positions": positions}
            chosen = read_settings(FIELDS, settings or [], given)
            _check_names(preset, mixer)
            _map_options(chosen, mixer, nu, features)
            if minutes is not None and not minutes > 0:
                raise ValueError(f"--minutes must be above 0, got {minutes:g}")
            where = EMBEDDED if data is None else data
            corpus = _corpus(where, prepare_it=data is None)
            choice: dict[str, Any] = {"preset": preset, "mixer": mixer, "rule": rule, "context": context}
            task, config = assemble(corpus, **choice, **chosen)
            out = Path("runs") / "-".join(filter(None, (preset, mixer, rule, context))) if out is None else out
        _announce(task, corpus, out)
        result = _run(task, config, out, fresh, minutes, where)
    except KeyboardInterrupt:
        say("Stopped; what was saved stays, and the same command goes on from it.")
        raise typer.Exit(130) from None
    if _first_process():
        _conclude(task, result, out)


def _run(task: LanguageTask, config: Any, out: Path, fresh: bool, minutes: float | None, data: Path) -> Result:
    from rich.console import Console

    from fastweights.training.checkpoint import CheckpointError
    from fastweights.training.diagnosis import Diverged
    from fastweights.training.folder import RunError
    from fastweights.training.language_run import keep_vocabulary
    from fastweights.training.loop import train

    # Absolute: the run may be used from another folder than the one it was started in.
    about = {"data": str(data.resolve()), "corpus": task.corpus.manifest["name"], **_provenance()}
    try:
        with input_errors(ValueError, ImportError):
            keep_vocabulary(out, task.corpus, fresh)
            return train(task, config, out, fresh=fresh, minutes=minutes, about=about, console=Console(stderr=True))
    except RunError as error:
        say(f"Error: {error}" + ("" if fresh else "\n--fresh starts anew, --out chooses another folder"))
        raise typer.Exit(2) from None
    except (CheckpointError, Diverged) as error:
        say(f"Error: {error}")
        raise typer.Exit(1) from None


def _provenance() -> dict[str, Any]:
    import torch

    from fastweights import provenance

    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = {"commit": provenance.commit(), "hardware": provenance.hardware(device), "versions": provenance.versions()}
    return {**where, "command": shlex.join(["fastweights", *sys.argv[1:]])}


def _announce(task: LanguageTask, corpus: Corpus, out: Path) -> None:
    if _first_process():
        words = f"{len(corpus.train):,} {corpus.vocabulary.kind} of {corpus.manifest['name']}"
        reading = f"{task.batch_size} segments of {task.segment}, context {task.context}"
        say(f"{task.n_parameters / 1e6:.2f} M parameters, {words} in {reading}; the run is kept in {out}")


def _conclude(task: LanguageTask, result: Result, out: Path) -> None:
    state = "finished" if result.finished else "not finished; the same command goes on"
    typer.echo(f"Run: {out} at step {result.step} ({state}), {result.wall_s:.0f} s of training")
    if result.best:
        how = f"segments of {task.segment} in {task.eval_batch} rows"
        typer.echo(f"Best validation perplexity: {result.best['ppl']:.2f} ({how})")
    folder = shlex.quote(str(out))
    typer.echo("Next:")
    typer.echo(f"  fastweights eval lm {folder} --split test --protocol {'carried' if task.carried else 'sliding'}")
    typer.echo(f'  fastweights generate {folder} --prompt "The" --tokens 50')


def _check_names(preset: str, mixer: str) -> None:
    """Before a corpus is prepared for a model that there is not."""
    from fastweights.models.presets import MIXER_CHOICES, PRESETS
    from fastweights.ops.tables import look_up

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


def _devices(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--devices must be a number of at least 1, or auto, got {text!r}")
    return int(text)


def read_settings(fields: Fields, entries: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """The options, and the values of FIELD=VALUE with the types of their fields."""
    hints = fields.types()
    chosen = {name: value for name, value in given.items() if value is not None}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals:
            raise ValueError(f"--set takes FIELD=VALUE, got {entry!r}")
        fields.check(name)
        if name in chosen:
            raise ValueError(f"{name} is given twice: {chosen[name]!r} and {text!r}")
        chosen[name] = _value(name, text, hints[name])
    return chosen


def _value(name: str, text: str, hint: Any) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if fits(value, hint):
        return value
    # A number where a name is meant is that name.
    if fits(text, hint):
        return text
    shown = getattr(hint, "__name__", str(hint)).replace("NoneType", "None")
    raise ValueError(f'{name} takes {shown}, got {text!r}; write it as in JSON: 3, 0.5, true, null, [1,2], {{"nu":2}}')


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON can stand for a field of that type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if origin is tuple:
        if not isinstance(value, list):
            return False
        expected = [inner[0]] * len(value) if Ellipsis in inner else list(inner)
        return len(value) == len(expected) and all(map(fits, value, expected))
    if origin is Mapping:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _corpus(folder: Path, prepare_it: bool) -> Corpus:
    from fastweights.data.tokens import Corpus

    if prepare_it:
        from fastweights.data.prepare import prepare

        if not (folder / "manifest.json").exists() and _first_process():
            say(f"Preparing the documentation of Python as a corpus in {folder}")
        prepare("embedded", None, folder)
    return Corpus.load(folder)


def _first_process() -> bool:
    """Whether this process is the one that speaks; torchrun and Lightning number the others in the environment."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))


@contextmanager
def input_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Wrong input ends the command with a sentence and exit code 2."""
    try:
        yield
    except kinds as error:
        say(f"Error: {error}")
        raise typer.Exit(2) from None


def say(message: str) -> None:
    typer.echo(message, err=True)
