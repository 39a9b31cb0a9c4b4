"""`fastweights bench kernels`: are the rules right on this GPU, and how fast are they next to their rivals?

Everything is compared with float64 first: every configuration with every rule, then each row. Then each rival is
timed in the same run, eager and as a CUDA graph. A rival that fails is recorded as such; fla and FlashQLA, which may
take the GPU's context with them, run in a process of their own while this one waits.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastweights.benchmarks.kernels import checks, layers
from fastweights.benchmarks.kernels.first_call import first_calls
from fastweights.benchmarks.kernels.rivals import RIVALS, has, judge_and_time, measure_rival, ours, rivals_of
from fastweights.benchmarks.kernels.rows import DTYPES, LIMITS, ROWS, SEED, floor_ms
from fastweights.benchmarks.kernels.tuning import COMPILING_LIMIT_S, LIMIT_S, Job, TuningProcess, compile_ahead, summary
from fastweights.benchmarks.record import Out, Record
from fastweights.benchmarks.timing import attempt, bandwidth, failure_noted
from fastweights.commands.options import AsJson, chosen_names, flag, input_errors, option
from fastweights.common.provenance import installed
from fastweights.common.tables import check_name
from fastweights.ops.backends import BACKENDS
from fastweights.ops.features import Features

QUICK = ("paper small", "2k, heads of 64")
# Where first calls are timed from nothing.
COLD = (*QUICK, "paper medium", "gated delta, 4k, 32 heads of 128", "gated delta per key, 4k, 32 heads of 128")
PARTS = ("checks", "first calls", "rows", "layers")
PACKAGES = ("triton", "fla-core", "flash-qla", "tilelang")

Ahead = dict[tuple[str, str, str], dict[str, Any]]


def _described(name: str, dtype: str, bytes_per_s: float) -> dict[str, Any]:
    """Describe a row before it is measured."""
    row = ROWS[name]
    case = {"part": "shape", "name": name, "rule": row.rule, "per_key": row.per_key, "shape": list(row.shape)}
    return case | {"dtype": dtype, "floor_ms": floor_ms(row, DTYPES[dtype], bytes_per_s), "measured": {}}


def _case(
    name: str, dtype: str, which: tuple[str, ...], budget_ms: float, ahead: Ahead, separate: TuningProcess
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was found for ours and for each rival, errors and times, by name."""
    row = ROWS[name]
    yield "fastweights", attempt(judge_and_time, row, dtype, ours(row), budget_ms)
    for rival in rivals_of(row, dtype, which):
        if rival.processes:
            found = separate.measure(measure_rival, row, dtype, rival.name, budget_ms)
            compiled = ahead.get((name, dtype, rival.name))
            yield rival.name, found | ({} if compiled is None else {"ahead": compiled})
        else:
            yield rival.name, attempt(judge_and_time, row, dtype, rival, budget_ms)


def _verdict(found: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return whether ours are right, or why they refuse the row, which is not wrong."""
    failure = found.get("failure", "")
    if failure.startswith("ValueError"):
        return {"refused": failure}
    errors = found.get("errors", {})
    right = bool(errors) and "backward_failure" not in found and max(errors.values()) <= LIMITS[dtype]
    return {"errors": errors, "right": right} | ({"failure": failure} if failure else {})


def _summary_line(found: dict[str, Any]) -> str:
    """Summarise one way to compute a row in a line: errors, then times."""
    if "failure" in found:
        return f"failed: {found['failure']}"
    errors = ", ".join(f"{name} {error:.0e}" for name, error in found.get("errors", {}).items())
    times = [
        f"{label} {found[f'{step}_{mode}_ms']:.3f} ms {mode}"
        for step, label in (("forward", "forward"), ("both", "with backward"))
        for mode in ("graph", "eager")
        if f"{step}_{mode}_ms" in found
    ]
    failures = [f"{key}: {found[key]}" for key in found if key.endswith("_failure")]
    return "; ".join(filter(None, (f"off by {errors}" if errors else "", ", ".join(times), *failures)))


def _compile_ahead(console: Console, cases: Sequence[tuple[str, str]], which: tuple[str, ...], processes: int) -> Ahead:
    """Let processes compile what the rows need; return what that took, by row, dtype and rival."""
    jobs = [
        Job(name, dtype, rival.name, part, rival.processes)
        for name, dtype in cases
        for rival in (ours(ROWS[name]), *rivals_of(ROWS[name], dtype, which))
        for part in range(rival.processes)
    ]
    # FlashQLA's compiler is the slowest, and the more parts there are, the longer each takes.
    jobs.sort(key=lambda job: (job.rival != "flashqla", -job.parts))
    console.print(f"compiling ahead: {len(jobs)} shares by {processes} processes", style="dim")
    results: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for job, result in compile_ahead(jobs, processes):
        console.print(f"compiled {', '.join(map(str, job))}: {result}", style="dim", markup=False)
        results.setdefault(job[:3], []).append(result)
    return {key: summary(found) for key, found in results.items()}


def _mebibytes(measured: dict[str, Any]) -> str:
    return f"{measured['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in measured else "-"


def _table(cases: list[dict[str, Any]]) -> Table:
    """Show ours, the quickest rival, and their ratio, in eager mode and as graphs."""
    table = Table(
        *("row", "dtype", "error", "forward graph", "f+b eager", "f+b graph", "x floor", "MiB", "rival's MiB"),
        *("best rival eager", "best rival graph", "faster eager", "faster graph"),
        title="forward and backward, ms",
    )
    for case in cases:
        ours = case["measured"]["fastweights"]
        others = {name: found for name, found in case["measured"].items() if name != "fastweights"}
        best = {}
        for mode in ("eager", "graph"):
            times = {name: x[f"both_{mode}_ms"] for name, x in others.items() if f"both_{mode}_ms" in x}
            best[mode] = min(times.items(), key=lambda item: item[1]) if times else ("-", float("nan"))
        eager, graph = (ours.get(f"both_{mode}_ms", float("nan")) for mode in ("eager", "graph"))
        table.add_row(
            *(case["name"], case["dtype"], f"{max(case.get('errors', {}).values(), default=float('nan')):.0e}"),
            *(f"{ours.get('forward_graph_ms', float('nan')):.4f}", f"{eager:.4f}", f"{graph:.4f}"),
            *(f"{graph / case['floor_ms']:.1f}", _mebibytes(ours), _mebibytes(others.get(best["graph"][0], {}))),
            *(f"{best[mode][1]:.3f} {best[mode][0]}" for mode in ("eager", "graph")),
            *(f"{best['eager'][1] / eager:.1f} x", f"{best['graph'][1] / graph:.1f} x"),
        )
    return table


MAPS = [Features.named("dpfp", nu, sum=True, logits=True) for nu in (1, 2, 3)]


def _in_layers(budget_ms: float, which: tuple[str, ...], separate: TuningProcess) -> Iterator[dict[str, Any]]:
    """Measure maps inside the kernels and before them, whole layers, and decoding."""
    for name in layers.HEADS:
        for dtype in DTYPES:
            for features in MAPS:
                row: dict[str, Any] = {"part": "features", "name": name, "dtype": dtype, "nu": features.nu}
                with failure_noted(row):
                    row["error"] = layers.fused_error(name, DTYPES[dtype], features)
                    row["right"] = row["error"] <= LIMITS[dtype]
                for way, inside in (("inside", True), ("before", False)):
                    row[way] = attempt(layers.fused, name, DTYPES[dtype], features, inside, budget_ms)
                yield row
    for name in layers.HEADS:
        for phi, nu in (("elu", 0), ("dpfp", 3)):
            row = {"part": "layer", "name": name, "feature_map": phi, "nu": nu}
            yield row | attempt(layers.layer, name, phi, nu, budget_ms)
    for batch in layers.BATCHES:
        row = {"part": "decode", "batch": batch, "measured": {}}
        with failure_noted(row):
            row["measured"] |= layers.decode(batch, budget_ms)
        if "fla" in which and has("fla"):
            row["measured"]["fla recurrent"] = separate.measure(layers.decode_fla, batch, budget_ms)
        yield row


def _checks(console: Console, quick: bool) -> Iterator[dict[str, Any]]:
    """Check every configuration with every rule, and layers in CUDA graphs."""
    kinds = list(checks.every_kind())
    if quick:
        kinds = kinds[:: max(1, len(kinds) // 12)]
    console.print(f"checking {len(kinds)} kinds of kernels against float64", style="dim")
    for key, found in checks.check_kinds(kinds, min(16, os.cpu_count() or 1)).items():
        yield {"part": "check", "name": key, **found}
    for options in ({"feature_map": "elu"}, {"rule": "gated_delta", "feature_map": "dpfp"}):
        row = {"part": "graph", "name": f"layer {options}", "right": False}
        yield row | attempt(checks.layer_in_a_graph, **options)


def _chosen(rows: Sequence[str], quick: bool) -> list[str]:
    """Return the rows of these names, or with one of these in their names; all rows, if nothing is given."""
    parts = [part for part in rows if part not in ROWS]
    names = [
        name for name in (QUICK if quick else ROWS) if not rows or name in rows or any(part in name for part in parts)
    ]
    if not names:
        raise ValueError(f"no row has {' or '.join(rows)} in its name; there are: {'; '.join(ROWS)}")
    return names


def _seconds(row: dict[str, Any]) -> str:
    ways = {way: found for way, found in row.items() if isinstance(found, dict)}
    return ", ".join(
        f"{way} {found['first_s']:.2f} s" if "first_s" in found else f"{way} failed: {found['failure']}"
        for way, found in ways.items()
    )


def run(
    out: Out = None,
    quick: Annotated[bool, flag("quick", "Measure only two rows, and check only a few kernels.")] = False,
    rivals: Annotated[
        str, option(f"Rivals, from {', '.join(RIVALS)}; fla first tunes itself for a minute.")
    ] = "sdpa,chunked",
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--row", help="Measure only the row with this name, or all rows whose names contain it; repeatable."
        ),
    ] = None,
    parts: Annotated[
        list[str] | None, typer.Option("--part", help=f"Do only this: {', '.join(PARTS)}; repeatable.")
    ] = None,
    ahead: Annotated[
        int, option("Processes that compile everything before anything is timed; 0: at first calls.", min=0)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Check the GPU kernels against float64, then time them beside their rivals."""
    with input_errors():
        which, names = tuple(chosen_names(dict.fromkeys(RIVALS), rivals, "rival")), _chosen(rows or [], quick)
        for part in parts or []:
            check_name(PARTS, part, "part")
    wanted = parts or (("checks", "rows") if quick else PARTS)
    record = Record("kernels", "cuda", SEED, out, as_json)
    console = record.console
    if reason := BACKENDS["triton"].unavailable():
        console.print(f"nothing to measure: {reason}")
        raise typer.Exit(1)
    bytes_per_s = bandwidth()
    record.add({"part": "machine", "bandwidth_bytes_per_s": bytes_per_s, **installed(*PACKAGES)})
    separate = TuningProcess(LIMIT_S if ahead else COMPILING_LIMIT_S)
    pairs = [(name, dtype) for name in names for dtype in ROWS[name].dtypes if "rows" in wanted]
    cases: list[dict[str, Any]] = []
    budget_ms = 20 if quick else 60
    try:
        if "checks" in wanted:
            record.add(*_checks(console, quick))
        cold = [name for name in COLD if name in names]
        for row in first_calls(cold, "bfloat16") if "first calls" in wanted and cold else ():
            console.print(f"first call of {row['name']}: {_seconds(row)}", markup=False)
            record.add(row)
        compiled = _compile_ahead(console, pairs, which, ahead) if ahead and pairs else {}
        if {"fla", "flashqla"} & set(which):
            separate.start()
        for name, dtype in pairs:
            cases.append(_described(name, dtype, bytes_per_s))
            record.add(cases[-1])
            console.print(f"{name}, {dtype}:")
            for who, found in _case(name, dtype, which, budget_ms, compiled, separate):
                console.print(f"  {who}: {_summary_line(found)}", highlight=False, markup=False)
                cases[-1]["measured"][who] = found
                if who == "fastweights":
                    cases[-1] |= _verdict(found, dtype)
                record.add()
        for row in _in_layers(budget_ms, which, separate) if "layers" in wanted else ():
            console.print(f"measured {row['part']} {row.get('name', '')}", style="dim")
            record.add(row)
    finally:
        separate.end()
    wrong = [row for row in record.rows if row.get("right") is False]
    lines = [f"WRONG: {row['name']}: {row.get('failure') or row.get('errors') or row.get('error')}" for row in wrong]
    lines += [f"refused: {case['name']}: {case['refused']}" for case in cases if "refused" in case]
    record.finish(_table(cases), *lines)
    if wrong:
        raise typer.Exit(1)
