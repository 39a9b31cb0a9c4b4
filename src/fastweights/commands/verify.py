"""`fastweights verify`: judge anybody's function of this family of recurrences by float64."""

import sys
import time
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fastweights.commands.options import (
    AsJson,
    Device,
    as_json,
    check_seed,
    input_errors,
    interruptible,
    option,
    pick_device,
    print_json,
    settings_of,
)
from fastweights.common.files import write_atomically
from fastweights.common.provenance import installed, origin
from fastweights.common.tables import look_up
from fastweights.conformance.adapters import NAMES, adapt, convention_of, load
from fastweights.conformance.cases import CASES, Case
from fastweights.conformance.judge import VERDICTS, Bench, Row, passed
from fastweights.conformance.oracle import LEAST, SAFETY
from fastweights.conformance.problem import HEAD_SIZE, RECURRENCES, recurrence_of
from fastweights.conformance.processes import judge_in_processes

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STYLES = {"right": "green", "inexact": "yellow", "wrong": "red", "error": "red"}
MEASURE = (
    "An error is the largest distance between a vector and the exact one, over the largest length of an exact one "
    f"(at least {LEAST:g} of the largest output or gradient). A tolerance is {SAFETY:g} times the largest of: the unit "
    "roundoff of the dtype; what rounding all inputs once more does to the exact result; the error of the plain loop "
    "over time in that dtype."
)


def verify(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The function to check.")],
    convention: Annotated[
        str | None, typer.Option("--as", help=f"Its interface: {', '.join(NAMES)}.", show_default="by its arguments")
    ] = None,
    rule: Annotated[
        str | None, option(f"What it computes: {', '.join(RECURRENCES)}.", "by the function's name")
    ] = None,
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="Run only cases whose names contain this; repeatable.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Leave out cases whose names contain this; repeatable.")
    ] = None,
    keywords: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME=VALUE", help="Also pass this argument to the function; repeatable."),
    ] = None,
    dtype: Annotated[str | None, option(f"{', '.join(DTYPES)}.", "float32, on a GPU bfloat16")] = None,
    device: Device = "auto",
    seed: Annotated[int, option("Seed of the random inputs.")] = 0,
    head_size: Annotated[int, option("Channels of keys and values, except in cases about sizes.", min=1)] = HEAD_SIZE,
    processes: Annotated[
        int | None, option("Number of separate processes that run the cases.", "0, on a GPU 1", min=0)
    ] = None,
    limit: Annotated[float, option("Seconds that a case may take in a separate process.")] = 300.0,
    tune_over: Annotated[
        int | None, option("Largest number of configurations over which Triton tunes a kernel.", min=1)
    ] = None,
    out: Annotated[Path | None, option("Write the verdicts to this JSON file.", False)] = None,
    json: AsJson = False,
) -> None:
    """Check a function against float64 on hard cases: decays, lengths, packing, splits, states, gradients, NaN.

    Functions of flash-linear-attention, transformers and this package are recognised by their arguments. Give your own
    function the argument names of flash-linear-attention. A case that it has no argument for, or refuses, is "not
    supported". A case that crashes or hangs in a separate process is an error and does not stop the others. The exit
    status is 0 if at least one case is right and none is inexact, wrong or an error, and 1 otherwise.
    """
    start = time.perf_counter()
    sys.path.insert(0, "")
    with input_errors():
        check_seed(seed)
        where = pick_device(device)
        kind = look_up(DTYPES, dtype or ("bfloat16" if where.startswith("cuda") else "float32"), "dtype")
        loaded, options = load(function), settings_of(keywords or [])
        called, name = convention_of(loaded, convention), recurrence_of(function.partition(":")[2], rule)
        chosen = _chosen(cases or [""], without or [])
        apart = processes if processes is not None else int(where.startswith("cuda"))
        if tune_over and not apart:
            raise ValueError("--tune-over changes Triton in other processes only; add --processes 1")
    bench = Bench(RECURRENCES[name], kind, where, seed, head_size)
    if apart:
        judged = judge_in_processes(bench, function, called, options, chosen, apart, limit, tune_over)
    else:
        judged = bench.judge(adapt(loaded, called, bench.recurrence, options), chosen)
    console = Console(stderr=json)
    about = {
        "function": function,
        "options": options,
        "package": _package(function),
        "convention": called,
        "rule": name,
        "dtype": str(kind).removeprefix("torch."),
        **origin(where),
        "seed": seed,
        "head_size": head_size,
        "tuned_over": tune_over,
    }
    rows: list[Row] = []
    record: dict[str, Any] = {}
    with interruptible():
        progress = Console(stderr=True)
        for row in track(
            judged, "judging", len(chosen), console=progress, transient=True, disable=not progress.is_terminal
        ):
            rows = sorted((*rows, row), key=lambda row: _names().index(row.case))
            wall = round(time.perf_counter() - start, 1)
            record = {**about, "wall_s": wall, "measure": MEASURE, "rows": [row.as_json() for row in rows]}
            if out is not None:
                write_atomically(out, as_json(record).encode())
    console.print(_table(rows, f"{function} as {name}, {about['dtype']} on {where}"), MEASURE, sep="\n")
    counts = Counter(row.verdict for row in rows)
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    if json:
        print_json(record)
    raise typer.Exit(0 if passed(rows) else 1)


def _chosen(wanted: list[str], unwanted: list[str]) -> list[Case]:
    """Return the cases with one of the first in their names and none of the second."""
    chosen = [case for case in CASES if any(part in case.name for part in wanted)]
    left = [case for case in chosen if not any(part in case.name for part in unwanted)]
    if not left:
        but = f" but not {' or '.join(unwanted)}" if chosen else ""
        raise ValueError(f"no case has {' or '.join(wanted)}{but} in its name; there are: {', '.join(_names())}")
    return left


def _names() -> list[str]:
    return [case.name for case in CASES]


def _package(function: str) -> dict[str, str]:
    """Return the versions of the installed packages that a function is from."""
    return installed(*packages_distributions().get(function.partition(".")[0].partition(":")[0], []))


def _table(rows: list[Row], title: str) -> Table:
    table = Table("case", "verdict", "worst", "error", "tolerance", "note", title=title)
    for row in rows:
        worst: list[Any] = ["", "", ""]
        if row.worst is not None:
            worst = [row.worst, f"{row.errors[row.worst]:.1e}", f"{row.tolerances[row.worst]:.1e}"]
        table.add_row(row.case, row.verdict, *worst, row.note, style=STYLES.get(row.verdict))
    return table
