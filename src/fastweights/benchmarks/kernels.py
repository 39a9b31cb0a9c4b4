"""`fastweights bench kernels`: is the delta rule right on this GPU, and how fast is it next to its rivals?

Everything is compared with float64 first: every configuration with every rule, then each shape. Then each rival is
timed in the same run, eager and as a CUDA graph. A rival that fails is recorded as such.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fastweights as fw
from fastweights.benchmarks import kernel_checks, kernel_forms
from fastweights.benchmarks.gpu_timing import Forward, bandwidth, measure, short
from fastweights.benchmarks.record import write_record
from fastweights.ops.backends import BACKENDS
from fastweights.ops.features import Features

Shape = tuple[int, int, int, int, int]

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
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LIMITS = {"bfloat16": 1e-2, "float32": 1e-5}
RIVALS = ("sdpa", "chunked", "fla")
SEED = 0


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, keys of length 1, v, and beta in float32."""
    B, T, H, D, M = shape
    generator = torch.Generator("cuda").manual_seed(SEED)
    q, k, v = (torch.randn(B, T, H, n, device="cuda", generator=generator) for n in (D, D, M))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(B, T, H, device="cuda", generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta


def memory(backend: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The library's own call."""
    return fw.fast_weight_memory(q, k, v, beta=beta, backend=backend)[0]


def check(shape: Shape, dtype: torch.dtype, backend: str) -> dict[str, float]:
    """Relative error of output and gradients against float64, with the heads of `shape` and fewer tokens."""
    B, _, H, D, M = shape
    # Few walks go another way, and only when they are long.
    tensors = inputs((min(B, 16), 300 if B > 1 else 2300, H, D, M), dtype)
    dy = torch.randn(tensors[2].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(SEED + 1))

    def everything(backend: str, wide: bool) -> list[Tensor]:
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in tensors]
        y = memory(backend, *leaves)
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    pairs = zip(everything(backend, False), everything("chunked", True), strict=True)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    return dict(zip(("y", "dq", "dk", "dv", "dbeta"), errors, strict=True))


def rivals(shape: Shape, dtype: str, which: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], tuple[Forward, Any]]]]:
    """Name of each that can take the shape, and a function that makes its forward pass and its leaves."""
    _, T, _, D, M = shape

    def on(function: Callable[..., Tensor], cast_gate: bool = False) -> Callable[[], tuple[Forward, Any]]:
        def make() -> tuple[Forward, Any]:
            q, k, v, beta = inputs(shape, DTYPES[dtype])
            leaves = [x.requires_grad_() for x in (q, k, v, beta.to(q.dtype) if cast_gate else beta)]
            return lambda: function(*leaves), leaves

        return make

    yield "fastweights", on(lambda *x: memory("triton", *x))
    if "chunked" in which:
        yield "chunked", on(lambda *x: memory("chunked", *x))
        if T < 2048:
            # Compiled it takes as long to compile as there are chunks.
            yield "chunked, compiled", lambda: on(torch.compile(lambda *x: memory("chunked", *x)))()
    if "sdpa" in which and dtype != "float32":
        yield "sdpa", lambda: _attention(shape, DTYPES[dtype])
    # fla reads past its arrays where D and M differ.
    if "fla" in which and find_spec("fla") is not None and D == M:
        if dtype != "float32":
            yield "fla chunk", on(_fla("chunk_delta_rule"), cast_gate=True)
        if T <= 2048:
            yield "fla recurrent", on(_fla("fused_recurrent_delta_rule"), cast_gate=True)


def _fla(name: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        import fla.ops.delta_rule

        y: Tensor = getattr(fla.ops.delta_rule, name)(q, k, v, beta, scale=1.0)[0]
        return y

    return run


def _attention(shape: Shape, dtype: torch.dtype) -> tuple[Forward, Any]:
    """Causal softmax attention with heads of D, laid out as it likes them."""
    B, T, H, D, _ = shape
    q, k, v = (torch.randn(B, H, T, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)


def floor_ms(shape: Shape, dtype: torch.dtype, bytes_per_s: float) -> float:
    """What reading every input and writing every output once takes, forward and backward."""
    B, T, H, D, M = shape
    # q, k, v in, y out; then q, k, v, dy in, dq, dk, dv out; and beta three times.
    return 1e3 * B * T * H * ((6 * D + 5 * M) * dtype.itemsize + 3 * 4) / bytes_per_s


def _more_versions() -> dict[str, str]:
    found = {}
    for package in ("triton", "fla-core"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _case(name: str, dtype: str, which: tuple[str, ...], budget_ms: float, bytes_per_s: float) -> dict[str, Any]:
    """One shape in one dtype: errors first, then everybody's times."""
    shape = SHAPES[name]
    case: dict[str, Any] = {"name": name, "shape": list(shape), "dtype": dtype, "measured": {}}
    case["floor_ms"] = floor_ms(shape, DTYPES[dtype], bytes_per_s)
    try:
        case["errors"] = check(shape, DTYPES[dtype], "triton")
        case["right"] = all(error <= LIMITS[dtype] for error in case["errors"].values())
    except Exception as error:
        case |= {"right": False, "failure": short(error)}
    for rival, make in rivals(shape, dtype, which):
        try:
            case["measured"][rival] = measure(make, budget_ms)
        except Exception as error:
            case["measured"][rival] = {"failure": short(error)}
        torch.cuda.empty_cache()
    return case


def _table(cases: list[dict[str, Any]]) -> Table:
    """Ours, the quickest rival, and their ratio, in eager mode and as graphs."""
    table = Table(
        *("shape", "dtype", "error", "forward graph", "f+b eager", "f+b graph", "x floor", "MiB", "first call s"),
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
            *(f"{graph / case['floor_ms']:.1f}", f"{ours.get('peak_bytes', 0) / 2**20:.0f}"),
            f"{ours.get('first_call_s', float('nan')):.2f}",
            *(f"{best[mode][1]:.3f} {best[mode][0]}" for mode in ("eager", "graph")),
            *(f"{best['eager'][1] / eager:.1f} x", f"{best['graph'][1] / graph:.1f} x"),
        )
    return table


MAPS = [Features.named("dpfp", nu, sum=True, logits=True) for nu in (1, 2, 3)]


def _forms(budget_ms: float) -> Iterator[dict[str, Any]]:
    """Maps inside the kernels and before them; whole layers; decoding."""
    for name in kernel_forms.HEADS:
        for dtype in DTYPES:
            for features in MAPS:
                row: dict[str, Any] = {"part": "features", "name": name, "dtype": dtype, "nu": features.nu}
                with _noted(row):
                    row["error"] = kernel_forms.fused_error(name, DTYPES[dtype], features)
                    row["right"] = row["error"] <= LIMITS[dtype]
                for way, inside in (("inside", True), ("before", False)):
                    row[way] = {}
                    with _noted(row[way]):
                        row[way] |= kernel_forms.fused(name, DTYPES[dtype], features, "apart", inside, budget_ms)
                yield row
    for name in kernel_forms.HEADS:
        for phi, nu in (("elu", 0), ("dpfp", 3)):
            row = {"part": "layer", "name": name, "feature_map": phi, "nu": nu}
            with _noted(row):
                row |= kernel_forms.layer(name, phi, nu, budget_ms)
            yield row
    for batch in kernel_forms.BATCHES:
        yield {"part": "decode", "batch": batch, "measured": kernel_forms.decode(batch, budget_ms)}


@contextmanager
def _noted(row: dict[str, Any]) -> Iterator[None]:
    """What fails is recorded and the rest goes on."""
    try:
        yield
    except Exception as error:
        row["failure"] = short(error)
    torch.cuda.empty_cache()


def _checks(console: Console, quick: bool) -> Iterator[dict[str, Any]]:
    """Every configuration with every rule, and layers in CUDA graphs."""
    kinds = list(kernel_checks.every_kind())
    if quick:
        kinds = kinds[:: max(1, len(kinds) // 12)]
    console.print(f"checking {len(kinds)} kinds of kernels against float64", style="dim")
    for key, found in kernel_checks.check_kinds(kinds, min(16, os.cpu_count() or 1)).items():
        yield {"part": "check", "name": key, **found}
    for options in ({"feature_map": "elu"}, {"rule": "gated_delta", "feature_map": "dpfp"}):
        row: dict[str, Any] = {"part": "graph", "name": f"layer {options}", "right": False}
        with _noted(row):
            row |= kernel_checks.layer_in_a_graph(**options)
        yield row


def run(out: Path | None, quick: bool, which: tuple[str, ...]) -> bool:
    """Check, measure, print the table, and write the JSON file if asked for. False where a check failed."""
    console, start = Console(), time.perf_counter()
    if reason := BACKENDS["triton"].unavailable():
        console.print(f"nothing to measure: {reason}")
        return False
    bytes_per_s = bandwidth()
    rows: list[dict[str, Any]] = [{"part": "machine", "bandwidth_bytes_per_s": bytes_per_s, **_more_versions()}]

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if out is not None:
            write_record(out, "kernels", "cuda", SEED, start, rows)

    for row in _checks(console, quick):
        add(row)
    cases = []
    budget_ms = 20 if quick else 60
    for name in QUICK if quick else SHAPES:
        # The paper trained in float32; at the longer shapes nobody does.
        for dtype in DTYPES if SHAPES[name][1] < 2048 else ("bfloat16",):
            console.print(f"measuring {name}, {dtype}", style="dim")
            cases.append(_case(name, dtype, which, budget_ms, bytes_per_s))
            add({"part": "shape", **cases[-1]})
    if not quick:
        for row in _forms(budget_ms):
            console.print(f"measured {row['part']} {row.get('name', '')}", style="dim")
            add(row)
    console.print(_table(cases))
    wrong = [row for row in rows if row.get("right") is False]
    for row in wrong:
        console.print(f"WRONG: {row['name']}: {row.get('failure') or row.get('errors') or row.get('error')}")
    if out is not None:
        console.print(f"written to {out}")
    return not wrong
