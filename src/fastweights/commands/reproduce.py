"""`fastweights reproduce` trains the models of figures and tables; `fastweights report` draws what has been trained."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.commands.options import (
    AsJson,
    Device,
    check_seed,
    flag,
    input_errors,
    option,
    pick_device,
    print_json,
    read_settings,
    require,
    say,
)
from fastweights.commands.progress import Display
from fastweights.common.formatting import format_seconds
from fastweights.common.tables import look_up
from fastweights.experiments import EXPERIMENTS, load_experiments
from fastweights.experiments.engine.experiment import SCALES, BadInput, Cell, Experiment, Selection, UserInput
from fastweights.experiments.engine.register import known_scales
from fastweights.experiments.engine.store import Store
from fastweights.experiments.engine.sweep import sweep
from fastweights.report.build import build
from fastweights.report.chapter import Chapter
from fastweights.report.rows import summary

_BAD_INPUT = (BadInput, ValueError, ImportError)
Plan = tuple[Experiment, list[Cell], Path | None]
"""An experiment, its cells to be trained, and the folder of its data."""

Load = Annotated[list[Path] | None, option("A Python file that registers your own experiments.", metavar="FILE")]
Out = Annotated[Path, option("Folder of the results.")]


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Figures and tables, or 'all'.")] = None,
    list_: Annotated[bool, flag("list", "Show all experiments, what they cost, and which have been run.")] = False,
    as_json: AsJson = False,
    scale: Annotated[
        str, option("smoke (seconds), small (minutes), paper, code (its released code), or a stand-in's name.")
    ] = "small",
    models: Annotated[str | None, option("Only these models, separated by commas.")] = None,
    sizes: Annotated[
        str | None, option("These sizes instead of the scale's: numbers of keys such as 20,40, or D.")
    ] = None,
    seeds: Annotated[str | None, option("These seeds instead of the scale's, such as 1,2,3.")] = None,
    device: Device = "auto",
    jobs: Annotated[
        int | None, option("Models trained at once.", "the number of cores; on a GPU 8, of language models 1")
    ] = None,
    data: Annotated[
        list[Path] | None,
        option(
            "A prepared corpus for scales paper and code; repeat it for tables that need different ones.", metavar="DIR"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of every model or of its training."),
    ] = None,
    part: Annotated[
        str | None, option("Train the I-th of N parts of the models, for a sweep on N machines.", metavar="I/N")
    ] = None,
    keep_runs: Annotated[
        bool, flag("keep-runs", "Keep trained models in OUT/NAME/runs, where they can be used like any run.")
    ] = False,
    load: Load = None,
    out: Out = Path("reproduced"),
    force: Annotated[bool, flag("force", "Train models again that have results already.")] = False,
) -> None:
    """Train the models behind figures and tables of the paper, draw them, and say which of its statements hold.

    Every model's result is kept as soon as it is trained: the same command resumes where an interrupted one stopped.
    """
    with input_errors(_BAD_INPUT):
        store = _open(out, load)
        if as_json and not list_:
            raise ValueError("--json is for --list; the results are JSON files in the folder of --out")
        if list_:
            print_json(_list(store)) if as_json else _print_list(store)
            return
        experiments = _experiments(names or [])
        selection = _selection(experiments, scale, models, sizes, seeds)
        device = pick_device(device)
        if jobs is not None and jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {jobs}")
        require("matplotlib", *(package for experiment in experiments for package in experiment.needs))
        _check(store)
        given = UserInput(tuple(data or ()), device=device)
        plans = _plans(experiments, scale, selection, given, settings or [])
        if part is not None:
            plans = _share(plans, part)
        # What shows most comes first.
        plans.sort(key=lambda plan: not plan[0].scales[scale].decides)
        store.check_writable()

    finished: set[str] = set()
    how: dict[str, Any] = {"device": device, "jobs": jobs, "keep": keep_runs, "force": force, "finished": finished}
    how["shared"] = part is not None
    with (
        _file_errors(),
        input_errors(_BAD_INPUT),
        Display(_console(), sum(len(cells) for _, cells, _ in plans)) as display,
    ):
        try:
            for experiment, cells, folder in plans:
                sweep(experiment, cells, store, display, data=folder, **how)
        except KeyboardInterrupt:
            further = "The same command resumes from there"
            if force:
                further = "Models that were not reached keep the results they had; the same command begins anew"
            done = f"Stopped: {display.finished} of {display.total} models are done and kept in {out}."
            say(f"{done} {further}; `fastweights report --out {out}` draws what there is.")
            raise typer.Exit(130) from None
    with _file_errors():
        _finish(store, {experiment.name for experiment in experiments}, detailed="all" not in (names or []))


def report(
    out: Out = Path("reproduced"),
    loss: Annotated[str, option("Which loss of a run counts: best or last.")] = "best",
    data: Annotated[
        list[Path] | None,
        option("A corpus whose set names are added to results that were made with it.", metavar="DIR"),
    ] = None,
    load: Load = None,
) -> None:
    """Draw the plots and the results page from existing results, without training anything."""
    with input_errors(_BAD_INPUT):
        metric = look_up({"best": "best_loss", "last": "last_loss"}, loss, "loss")
        store = _open(out, load)
        require("matplotlib")
        names = _check(store)
        if not names:
            raise ValueError(f"there are no results in {out}; `fastweights reproduce --list` shows what can be run")
        store.check_writable()
        for folder in data or []:
            store.keep_corpus(folder)
    with _file_errors():
        _finish(store, set(names), metric)


@contextmanager
def _file_errors() -> Iterator[None]:
    """End the command with a sentence and exit code 1 where a file cannot be written, as on a full disk."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        kept = "results that were stored before are kept; free some space and run the same command again"
        say(f"Error: {error.filename}: {error.strerror}; {kept}" if error.filename else f"Error: {error}")
        raise typer.Exit(1) from None


def _open(out: Path, files: Sequence[Path] | None) -> Store:
    """Load experiments of the user's own and open the folder of results, whose warnings are printed."""
    for path in files or ():
        load_experiments(path)
    return Store(out, lambda message: say(f"Warning: {message}"))


def _experiments(names: Sequence[str]) -> list[Experiment]:
    if not names:
        raise ValueError(f"name what to reproduce: {', '.join(EXPERIMENTS)}, or all; --list shows what each costs")
    chosen = [name for given in names for name in (EXPERIMENTS if given == "all" else [given])]
    return [look_up(EXPERIMENTS, name, "figure or table") for name in dict.fromkeys(chosen)]


def _selection(
    experiments: Sequence[Experiment], scale: str, models: str | None, sizes: str | None, seeds: str | None
) -> Selection:
    look_up(dict.fromkeys(known_scales()), scale, "scale")
    known = {model: model for experiment in experiments for model in experiment.models}
    chosen = None if models is None else tuple(look_up(known, model, "model") for model in _items(models, "--models"))
    selection = Selection(chosen, _numbers(sizes, "--sizes", 2), _numbers(seeds, "--seeds", 0))
    for seed in selection.seeds or ():
        check_seed(seed, "--seeds")
    if not any(experiment.grid(scale, selection) for experiment in experiments):
        choices = "; ".join(_choices(experiment, scale) for experiment in experiments)
        raise ValueError(f"this selection leaves nothing to run at scale {scale}: {choices}")
    return selection


def _choices(experiment: Experiment, scale: str) -> str:
    """Say what an experiment can be run with."""
    if scale not in experiment.scales:
        return f"{experiment.name} has scales {', '.join(experiment.scales)}"
    sizes, models = map(str, experiment.scales[scale].sizes), ", ".join(experiment.models)
    return f"{experiment.name} has sizes {', '.join(sizes)} and models {models}"


def _items(text: str, option: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError(f"{option} takes values separated by commas, got {text!r}")
    return list(dict.fromkeys(items))


def _numbers(text: str | None, option: str, least: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    items = _items(text, option)
    if not all(item.isdecimal() and int(item) >= least for item in items):
        raise ValueError(f"{option} takes whole numbers of at least {least} separated by commas, got {text!r}")
    return tuple(dict.fromkeys(int(item) for item in items))


def _plans(
    experiments: Sequence[Experiment], scale: str, selection: Selection, given: UserInput, settings: list[str]
) -> list[Plan]:
    """Return the cells of each experiment that has any and the folder of its data, before anything is trained."""
    chosen = [experiment for experiment in experiments if experiment.grid(scale, selection)]
    for experiment in experiments:
        if experiment not in chosen:
            say(f"{experiment.name}: nothing to run for this selection, skipped")
    takers = [experiment for experiment in chosen if experiment.make_inputs]
    for name, present in (("--data", given.data), ("--set", settings)):
        if present and not takers:
            others = ", ".join(experiment.name for experiment in chosen)
            raise ValueError(f"{name} is for language and translation models, not for {others}")
    plans = []
    for experiment in chosen:
        try:
            values = read_settings(experiment.fields, settings, {}) if experiment.fields else {}
            inputs = experiment.inputs_for(scale, replace(given, settings=values))
            plans.append((experiment, experiment.cells(scale, selection, inputs.config), inputs.data))
        except (BadInput, ValueError) as error:
            raise ValueError(f"{experiment.name}: {error}") from None
    return plans


def _share(plans: Sequence[Plan], part: str) -> list[Plan]:
    """Return the cells that machine I of N trains; every machine divides the same command in the same way.

    A cell that several tables share is in one part, and each part has its share of every experiment.
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"--part takes I/N with I from 1 to N, such as 2/4, got {part!r}")
    slugs = {cell.slug for _, cells, _ in plans for cell in cells}
    # By the hash that a slug ends in: models that take long are spread over the parts.
    mine = set(sorted(slugs, key=lambda slug: slug[::-1])[int(number) - 1 :: int(parts)])
    shares = [(experiment, [c for c in cells if c.slug in mine], folder) for experiment, cells, folder in plans]
    return [plan for plan in shares if plan[1]]


def _check(store: Store) -> list[str]:
    """Read everything that will be drawn, so that a broken file is found before anything is trained or written."""
    return [name for name in EXPERIMENTS if store.known(name)]


def _list(store: Store) -> list[dict[str, Any]]:
    """Return each experiment with its cost at every scale and what has been run of it, for JSON."""
    rows = []
    for name, experiment in EXPERIMENTS.items():
        known = [record for record in store.known(name).values() if record.config["scale"] == store.scale(name)]
        results = {"scale": store.scale(name), "cells": len(known), "train_s": sum(record.wall_s for record in known)}
        rows.append(
            {
                "name": name,
                "title": experiment.title,
                "where": experiment.where,
                "scales": {
                    s: {"cells": len(experiment.grid(s)), "cost": at.cost} for s, at in experiment.scales.items()
                },
                "results": results if known else None,
            }
        )
    return rows


def _print_list(store: Store) -> None:
    table = Table("name", "what", *(f"at scale {scale}" for scale in SCALES), "results", pad_edge=False, box=None)
    for row in _list(store):
        costs = [f"{at['cells']} models, {at['cost']}" if (at := row["scales"].get(name)) else "" for name in SCALES]
        results = "none"
        if known := row["results"]:
            results = f"{known['scale']}: {known['cells']} models, {format_seconds(known['train_s'])} of training"
        table.add_row(row["name"], f"{row['title']} ({row['where']})", *costs, results)
    _console(sys.stdout).print(table)
    for scale in known_scales()[len(SCALES) :]:
        names = ", ".join(name for name, experiment in EXPERIMENTS.items() if scale in experiment.scales)
        typer.echo(f"--scale {scale} --data DIR: a stand-in for scale paper, for {names}")


def _console(stream: object = None):  # type: ignore[no-untyped-def]

    console = Console(file=stream, stderr=stream is None, markup=False)  # type: ignore[arg-type]
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    return console


def _finish(store: Store, names: set[str], metric: str = "best_loss", *, detailed: bool = True) -> None:
    """Write plots and page, then print a summary of these experiments, after their tables and claims if `detailed`."""
    say(f"drawing the plots and the page in {store.out}")
    page, chapters = build(store, metric)
    chosen = [chapter for chapter in chapters if chapter.experiment.name in names]
    if detailed:
        _print_tables(chosen)
        _print_claims(chosen)
    for line in summary(chosen):
        typer.echo(line)
    typer.echo(f"Page: {page}")


def _print_tables(chapters: Sequence[Chapter]) -> None:
    for chapter in chapters:
        if chapter.scale is None or chapter.experiment.table is None:
            continue
        found = chapter.experiment.table(chapter.results)
        table = Table(title=f"{chapter.experiment.name} ({chapter.scale}): {chapter.experiment.title}", pad_edge=False)
        for number, name in enumerate(found.header):
            table.add_column(name, justify="right" if number else "left")
        for row in found.rows:
            table.add_row(*row)
        _console(sys.stdout).print(table)


def _print_claims(chapters: Sequence[Chapter]) -> None:
    colours = {True: "green", False: "red", None: "dim"}
    table = Table("figure", "claim", "ours", "paper", "holds?", pad_edge=False)
    for chapter in chapters:
        for claim in chapter.claims:
            where = f"{chapter.experiment.name} ({chapter.scale})" if chapter.scale else chapter.experiment.name
            answer = {"holds": "yes", "fails": "no"}.get(claim.verdict, claim.verdict)
            table.add_row(where, claim.text, claim.ours, claim.paper, Text(answer, style=colours[claim.holds]))
    _console(sys.stdout).print(table)
