"""`fastweights tour`: the overwrite task of the paper's App. B, every rule side by side."""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fastweights as fw
from fastweights.ops.rules import RULES


def overwrite(rule: str, beta: float, decay: float = 1.0, d: int = 16) -> tuple[float, float]:
    """Store d values under orthonormal keys, overwrite one, read all.

    Returns the error of the overwritten value against the new one and the mean error of the others against what was
    stored, each as a fraction of the value's norm.
    """
    torch.manual_seed(0)
    keys = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]
    old, new = torch.randn(2, d, d, dtype=torch.float64)
    old, new = (fw.l2_normalize(x) for x in (old, new[:1]))
    W = (keys.mT @ old).expand(1, 1, d, d)
    strengths = {"beta": beta, "decay": decay}
    values = {gate.name: strengths.get(gate.name, gate.idle) for gate in RULES[rule].gates}
    gates: dict[str, Any] = {name: torch.full((1, 1, 1), value).double() for name, value in values.items()}
    k, v = keys[:1].view(1, 1, 1, d), new.view(1, 1, 1, d)
    _, state = fw.fast_weight_memory(k, k, v, rule=rule, state=fw.FastWeightState(W), **gates)
    read: Tensor = keys @ state.W[0, 0]
    errors = (read - torch.cat([new, old[1:]])).norm(dim=-1)
    return errors[0].item(), errors[1:].mean().item()


def tour() -> None:
    """See the update rules side by side: which can overwrite one value and keep the others? Takes seconds."""
    console = Console()
    console.print(
        "A memory holds 16 values under 16 orthonormal keys. One is overwritten at full write strength (beta = 1, and "
        "decay = 0.9 where a rule fades). What is read afterwards, as an error relative to the value's size:\n"
    )
    table = Table("rule", "the new value", "the 15 others", "update")
    for name, description in fw.list_rules().items():
        overwritten, others = overwrite(name, beta=1.0, decay=0.9)
        table.add_row(name, f"{overwritten:.3f}", f"{others:.3f}", description)
    console.print(table)
    console.print(
        "\nThe sum rule cannot overwrite: it reads old + new. The gated rule forgets everything else to make room. The "
        "delta rule replaces the one value and leaves the others exactly as they were (App. B of the paper)."
    )
