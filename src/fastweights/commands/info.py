"""`fastweights info`: what is here, what it can do, and why something cannot be used."""

import platform
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fastweights as fw
from fastweights.commands.options import AsJson, flag, print_json
from fastweights.ops.backends import BACKENDS, ENVIRONMENT
from fastweights.ops.cpu import build
from fastweights.ops.gpu import self_check
from fastweights.ops.gpu.memory.self_check import SOURCE, check_of, shipped
from fastweights.ops.rules import RULES


def info(
    check_kernels: Annotated[
        bool, flag("check", "Compare every GPU kernel with float64 on this machine; takes minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions, devices, and every rule, feature map and backend, with what works on this machine."""
    if check_kernels and as_json:
        raise typer.BadParameter("--check prints a table; leave --json out")
    if check_kernels:
        raise typer.Exit(0 if check() else 1)
    if as_json:
        print_json(facts())
    else:
        show()


def check() -> bool:
    """Compare every shipped kernel configuration with float64 on this GPU, and return whether all are right."""
    console = Console()
    if reason := BACKENDS["triton"].unavailable():
        console.print(f"no kernels to check: {reason}")
        return True
    device = torch.device("cuda", torch.cuda.current_device())
    console.print(", ".join(self_check.machine(device, SOURCE).values()))
    kinds, bad = list(shipped()), 0
    console.print(f"checking {len(kinds)} kinds of kernels against float64", style="dim")
    table = Table("kernels", "worst", "off by", "limit", "seconds", "", title="Self-check against float64")
    for kind in kinds:
        start = time.perf_counter()
        kernels = check_of(kind, 2)
        verdict = kernels.run_again(device)
        reason = kernels.reason(verdict)
        bad += reason is not None
        worst = max(verdict.errors, key=lambda name: verdict.errors[name], default="-")
        off = f"{verdict.errors[worst]:.1e}" if verdict.errors else verdict.failure
        seconds = f"{time.perf_counter() - start:.1f}"
        table.add_row(str(kind), worst, off, f"{self_check.LIMITS[kind.dtype]:.0e}", seconds, "WRONG" if reason else "")
    console.print(table)
    console.print(f"{bad} wrong, and never used here" if bad else "all right")
    console.print(f"kept in {self_check.path(device, SOURCE)}")
    return not bad


def facts() -> dict[str, Any]:
    """Return versions, devices and every entry of the tables, for JSON."""
    try:
        library = build.origin()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    count = torch.get_num_threads()
    threads = f"{count} threads (on a busy machine OMP_NUM_THREADS=1 may be faster)" if count > 1 else "1 thread"
    devices = {"cpu": threads + (f"; C++ library: {library}" if library else "")}
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        devices[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
    reasons = {name: backend.unavailable() for name, backend in BACKENDS.items()}
    return {
        "versions": {"fastweights": fw.__version__, "torch": torch.__version__, "Python": platform.python_version()},
        "devices": devices,
        "backends": {
            name: {"usable": reasons[name] is None, "reason": reasons[name], "description": backend.description}
            for name, backend in BACKENDS.items()
        },
        "rules": {
            name: {
                "gates": list(RULES[name].gate_names),
                "backends": list(BACKENDS) if RULES[name].coefficients else ["reference"],
                "description": description,
            }
            for name, description in fw.list_rules().items()
        },
        "feature_maps": fw.list_feature_maps(),
    }


def show() -> None:
    """Print the tables."""
    console, here = Console(), facts()
    console.print(", ".join(f"{name} {version}" for name, version in here["versions"].items()))
    for name, device in here["devices"].items():
        console.print(f"{name}: {device}")
    family = "Linear rules: W = a W - e (a W k) ⊗ k + w v ⊗ k, with a, e and w from the rule's gates"
    order = f"Backends, in the order auto tries ({ENVIRONMENT})"
    backends = Table("backend", "usable here", "what it is", title=order, caption=family)
    for name, row in here["backends"].items():
        backends.add_row(name, "yes" if row["usable"] else f"no: {row['reason']}", row["description"])
    rules = Table("rule", "gates", "backends", "what it does", title="Update rules")
    for name, row in here["rules"].items():
        rules.add_row(name, ", ".join(row["gates"]) or "-", ", ".join(row["backends"]), row["description"])
    maps = Table("feature map", "what it is", title="Feature maps")
    for name, description in here["feature_maps"].items():
        maps.add_row(name, description)
    for table in (backends, rules, maps):
        console.print(table)
