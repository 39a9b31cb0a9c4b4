"""`fastweights bench kernels`: is the delta rule right on this GPU, and how fast is it next to its rivals?

Everything is compared with float64 first: every configuration with every rule, then each shape. Then each rival is
timed in the same run, eager and as a CUDA graph. A rival that fails is recorded as such; fla, which may take the GPU's
context with it, runs in a process of its own while this one waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fastweights.benchmarks.kernels import checks, layers
from fastweights.benchmarks.kernels.first_call import first_calls
from fastweights.benchmarks.kernels.rivals import (
    DTYPES,
    SEED,
    SeparateProcess,
    Shape,
    delta_rule,
    has_fla,
    inputs,
    make_rivals,
    measure_rival,
)
from fastweights.benchmarks.record import Out, Record
from fastweights.benchmarks.timing import attempt, bandwidth, failure_noted, measure
from fastweights.commands.options import AsJson, option
from fastweights.common.provenance import installed
from fastweights.ops.backends import BACKENDS
from fastweights.ops.features import Features
from fastweights.ops.gpu.self_check import relative_errors

SHAPES: dict[str, Shape] = {  # B, T, H, D, M
    "paper small": (96, 256, 8, 16, 16),
    "paper medium": (56, 384, 8, 32, 32),
    "small, DPFP-1": (96, 256, 8, 32, 16),
    "2k, heads of 64": (8, 2048, 16, 64, 64),
    "2k, heads of 128": (8, 2048, 16, 128, 128),
    "32k, heads of 64": (1, 32768, 16, 64, 64),
    "32k, heads of 128": (1, 32768, 16, 128, 128),
}
QUICK = ("paper small", "2k, heads of 64")
# Where first calls are timed from nothing.
COLD = ("paper small", "paper medium", "2k, heads of 64")
LIMITS = {"bfloat16": 1e-2, "float32": 1e-5}


def check(shape: Shape, dtype: torch.dtype, backend: str) -> dict[str, float]:
    """Return relative errors of output and gradients against float64, with the heads of `shape` and fewer tokens."""
    B, _, H, D, M = shape
    # Few walks go another way, and only when they are long.
    tensors = inputs((min(B, 16), 300 if B > 1 else 2300, H, D, M), dtype)
    dy = torch.randn(tensors[2].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(SEED + 1))

    def everything(backend: str, wide: bool) -> list[Tensor]:
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in tensors]
        y = delta_rule(backend, *leaves)
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    return relative_errors(("y", "dq", "dk", "dv", "dbeta"), everything(backend, False), everything("chunked", True))


def floor_ms(shape: Shape, dtype: torch.dtype, bytes_per_s: float) -> float:
    """Return the time it takes to read every input and write every output once, forward and backward."""
    B, T, H, D, M = shape
    # q, k, v in, y out; then q, k, v, dy in, dq, dk, dv out; and beta three times.
    return 1e3 * B * T * H * ((6 * D + 5 * M) * dtype.itemsize + 3 * 4) / bytes_per_s


def _case(
    name: str, dtype: str, which: tuple[str, ...], budget_ms: float, bytes_per_s: float, separate: SeparateProcess
) -> dict[str, Any]:
    """Measure one shape in one dtype: errors first, then everybody's times."""
    shape = SHAPES[name]
    case: dict[str, Any] = {"name": name, "shape": list(shape), "dtype": dtype, "measured": {}}
    case |= {"floor_ms": floor_ms(shape, DTYPES[dtype], bytes_per_s), "right": False}
    with failure_noted(case):
        case["errors"] = check(shape, DTYPES[dtype], "triton")
        case["right"] = all(error <= LIMITS[dtype] for error in case["errors"].values())
    for rival, make in make_rivals(shape, dtype, which):
        if rival.startswith("fla"):
            case["measured"][rival] = separate(measure_rival, shape, dtype, rival, budget_ms)
        else:
            case["measured"][rival] = attempt(measure, make, budget_ms)
    return case


def _mebibytes(measured: dict[str, Any]) -> str:
    return f"{measured['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in measured else "-"


def _table(cases: list[dict[str, Any]]) -> Table:
    """Show ours, the quickest rival, and their ratio, in eager mode and as graphs."""
    table = Table(
        *("shape", "dtype", "error", "forward graph", "f+b eager", "f+b graph", "x floor", "MiB", "fla MiB"),
        *("best rival eager", "best rival graph", "faster eager", "faster graph"),
        title="delta rule, ms",
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
            *(case["name"], case["dtype"], f"{max(case.get('errors', {'': float('nan')}).values()):.0e}"),
            *(f"{ours.get('forward_graph_ms', float('nan')):.4f}", f"{eager:.4f}", f"{graph:.4f}"),
            *(f"{graph / case['floor_ms']:.1f}", _mebibytes(ours), _mebibytes(others.get("fla chunk", {}))),
            *(f"{best[mode][1]:.3f} {best[mode][0]}" for mode in ("eager", "graph")),
            *(f"{best['eager'][1] / eager:.1f} x", f"{best['graph'][1] / graph:.1f} x"),
        )
    return table


MAPS = [Features.named("dpfp", nu, sum=True, logits=True) for nu in (1, 2, 3)]


def _in_layers(budget_ms: float, which: tuple[str, ...], separate: SeparateProcess) -> Iterator[dict[str, Any]]:
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
        if "fla" in which and has_fla():
            row["measured"]["fla recurrent"] = separate(layers.decode_fla, batch, budget_ms)
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


def _cases(quick: bool) -> Iterator[tuple[str, str]]:
    """Yield names and dtypes of the shapes; the paper trained in float32, at the longer ones nobody does."""
    for name in QUICK if quick else SHAPES:
        for dtype in DTYPES if SHAPES[name][1] < 2048 else ("bfloat16",):
            yield name, dtype


def _seconds(row: dict[str, Any]) -> str:
    ways = {way: found for way, found in row.items() if isinstance(found, dict)}
    return ", ".join(
        f"{way} {found['first_s']:.2f} s" if "first_s" in found else f"{way} failed: {found['failure']}"
        for way, found in ways.items()
    )


def run(
    out: Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure two shapes only.")] = False,
    rivals: Annotated[
        str, option("Rivals, from sdpa, chunked and fla; fla first tunes itself for a minute.")
    ] = "sdpa,chunked",
    as_json: AsJson = False,
) -> None:
    """Check the GPU kernels against float64, then time them beside their rivals."""
    record, which = Record("kernels", "cuda", SEED, out, as_json), tuple(rivals.split(","))
    console = record.console
    if reason := BACKENDS["triton"].unavailable():
        console.print(f"nothing to measure: {reason}")
        raise typer.Exit(1)
    bytes_per_s = bandwidth()
    record.add({"part": "machine", "bandwidth_bytes_per_s": bytes_per_s, **installed("triton", "fla-core")})
    separate = SeparateProcess()
    cases = []
    budget_ms = 20 if quick else 60
    try:
        if "fla" in which:
            separate.begin()
        record.add(*_checks(console, quick))
        for row in () if quick else first_calls({name: SHAPES[name] for name in COLD}, "bfloat16"):
            console.print(f"first call of {row['name']}: {_seconds(row)}")
            record.add(row)
        for name, dtype in _cases(quick):
            console.print(f"measuring {name}, {dtype}", style="dim")
            cases.append(_case(name, dtype, which, budget_ms, bytes_per_s, separate))
            record.add({"part": "shape", **cases[-1]})
        for row in () if quick else _in_layers(budget_ms, which, separate):
            console.print(f"measured {row['part']} {row.get('name', '')}", style="dim")
            record.add(row)
    finally:
        separate.close()
    wrong = [row for row in record.rows if row.get("right") is False]
    found = (f"WRONG: {row['name']}: {row.get('failure') or row.get('errors') or row.get('error')}" for row in wrong)
    record.finish(_table(cases), *found)
    if wrong:
        raise typer.Exit(1)
