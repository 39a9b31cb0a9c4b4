"""`fastweights info`: what is here, what it can do, and why something cannot be used."""

from __future__ import annotations

import platform
import time

import torch
from rich.console import Console
from rich.table import Table

import fastweights as fw
from fastweights.ops.backends import BACKENDS, ENVIRONMENT
from fastweights.ops.rules import RULES


def check() -> bool:
    """Compare every shipped kernel configuration with float64 on this GPU, print how far off it is; are all right?"""
    from fastweights.ops import self_check
    from fastweights.ops.gpu.memory.self_check import SOURCE, check_of, shipped

    console = Console()
    if reason := BACKENDS["triton"].unavailable():
        console.print(f"no kernels to check: {reason}")
        return True
    device = torch.device("cuda", torch.cuda.current_device())
    console.print(", ".join(self_check.machine(device, SOURCE).values()))
    table = Table("kernels", "worst", "off by", "limit", "seconds", "", title="Self-check against float64")
    bad = 0
    for kind in shipped():
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


def show() -> None:
    """Print the tables."""
    console = Console()
    console.print(f"fastweights {fw.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    console.print(f"cpu: {torch.get_num_threads()} threads")
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        console.print(f"cuda:{i}: {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}")

    backends = Table("backend", "usable here", "what it is", title=f"Backends, in the order auto tries ({ENVIRONMENT})")
    for backend in BACKENDS.values():
        reason = backend.unavailable()
        backends.add_row(backend.name, "yes" if reason is None else f"no: {reason}", backend.description)
    rules = Table("rule", "gates", "backends", "what it does", title="Update rules")
    for name, description in fw.list_rules().items():
        rule = RULES[name]
        where = ", ".join(BACKENDS) if rule.coefficients else "reference (outside the family)"
        rules.add_row(name, ", ".join(rule.gates) or "-", where, description)
    maps = Table("feature map", "what it is", title="Feature maps")
    for name, description in fw.list_feature_maps().items():
        maps.add_row(name, description)
    for table in (backends, rules, maps):
        console.print(table)
