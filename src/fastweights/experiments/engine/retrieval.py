"""What the retrieval figures share: configurations, the runner, and how losses are judged."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fastweights.common import provenance
from fastweights.experiments.engine.experiment import (
    NOT_RUN,
    Cell,
    CellOutcome,
    CellOutcomes,
    Claim,
    Experiment,
    Results,
    Scale,
    Setup,
    storable,
)
from fastweights.experiments.engine.shape import CURVE, Shape
from fastweights.feature_maps import feature_map
from fastweights.models.retrieval import MODELS
from fastweights.training.tasks.retrieval import train
from fastweights.training.tasks.retrieval_cell import RetrievalConfig

TARGET = 0.001
"""A run stops at this loss [Sec. 6.1.1]: at or below it, the task is solved."""

FAILURE = 0.01
"""From ten times the target on, errors are more than the noise of the last evaluation."""

CODE_OPTIONS: Mapping[str, Any] = {
    "patience": 1100,
    "orthogonal": True,
    "redraw_at_eval": True,
    "query_cap": 200,
    "chunk_mean": True,
}
"""The released code's way where the text says otherwise; `RetrievalConfig` says what each is."""

CODE_NOTE = (
    "As the released code does it where the text says otherwise; `fastweights report --loss last` for its figures."
)

SETTING_1 = {
    "softmax": "Softmax",
    "linear": "Linear (ELU + 1)",
    "favor-64": "FAVOR+ 64",
    "favor-128": "FAVOR+ 128",
    "favor-512": "FAVOR+ 512",
    "dpfp-1": "DPFP-1",
    "dpfp-2": "DPFP-2",
    "dpfp-3": "DPFP-3",
}

SETTING_2 = {
    "dpfp-1-sum": "sum rule, DPFP-1",
    "dpfp-1-delta": "delta rule (ours), DPFP-1",
    "dpfp-2-delta": "delta rule, DPFP-2",
    "linear-delta": "delta rule, ELU + 1",
    "favor-64-delta": "delta rule, FAVOR+ 64",
    "favor-128-delta": "delta rule, FAVOR+ 128",
    "schlag2021": "Schlag (2021)",
    "schlag2021-dpfp": "Schlag (2021) with DPFP",
}

LABELS = {**SETTING_1, **SETTING_2}

STORED: Shape = {
    "config": {"d_key": int},
    "metrics": {"best_loss": float | None, "last_loss": float | None, "steps": int, "curve": CURVE},
}
SMOKE = Scale(
    sizes=(4, 8),
    options={"d_key": 4, "max_steps": 20, "eval_every": 10},
    cost="5 s",
    note="Twenty steps of training: a check that everything runs, not a result.",
    decides=False,
)


def configure(
    setting: int, scales: Mapping[str, Scale], scale: str, model: str, size: int, seed: int
) -> Mapping[str, Any]:
    """Return the whole configuration of a cell, the defaults of its training included."""
    whole = RetrievalConfig(setting=setting, model=model, size=size, seed=seed, **scales[scale].options)
    entries = {"scale": scale, "rule": whole.entry.rule, **storable(asdict(whole))}
    # Named only where it is off: cells that were trained before there was the choice keep their names.
    if whole.exact_shortcuts:
        del entries["exact_shortcuts"]
    return entries


def run(cells: Sequence[Cell], setup: Setup) -> CellOutcomes:
    """Train the cells, each yielded as it finishes."""
    known_only_here = ("scale", "rule")
    by_config = {
        RetrievalConfig(**{key: value for key, value in cell.config.items() if key not in known_only_here}): cell
        for cell in cells
    }

    def progress(config: RetrievalConfig, step: int, loss: float) -> None:
        setup.on_progress(by_config[config], step, loss)

    # The longest first, so that no worker is left alone with one at the end.
    configs = sorted(by_config, key=lambda config: -config.size)
    jobs = setup.jobs or (8 if setup.device.startswith("cuda") else provenance.cores())
    for config, result in train(configs, device=setup.device, jobs=jobs, on_progress=progress):
        metrics = {name: getattr(result, name) for name in ("last_loss", "best_loss", "steps", "stopped", "curve")}
        yield by_config[config], CellOutcome(metrics, result.wall_s)


def figure(setting: int, scales: Mapping[str, Scale], **rest: Any) -> Experiment:
    """Return the experiment of a figure in that setting of the paper (1: Sec. 6.1.1, 2: Sec. 6.1.2)."""
    return Experiment(scales=scales, configure=partial(configure, setting, scales), run=run, stored=STORED, **rest)


def at_one_size(
    scales: Mapping[str, Scale], choose: Callable[[Sequence[int]], int], costs: Sequence[str], **small: Any
) -> dict[str, Scale]:
    """Return the scales of a figure that shows one size of another: its costs in their order, and what `small` is."""
    return {
        name: replace(scale, sizes=(choose(scale.sizes),), cost=cost, **(small if name == "small" else {}))
        for (name, scale), cost in zip(scales.items(), costs, strict=True)
    }


def d_dot(config: Mapping[str, Any]) -> int | None:
    """Return the size of phi(k), the number of associations the memory can hold; None for softmax, without a limit."""
    entry = {**MODELS[1], **MODELS[2]}[config["model"]]
    if entry.rule == "softmax":
        return None
    return feature_map(entry.feature_map, config["d_key"], **entry.options).dim


def show(loss: float) -> str:
    return "NaN" if math.isnan(loss) else f"{loss:.2g}" if loss < 0.0995 else f"{loss:.3g}"


def not_run(text: str, paper: str) -> Claim:
    return Claim(text, NOT_RUN, paper, None)


def beats(results: Results, model: str, others: Sequence[str], text: str, paper: str) -> Claim:
    """Judge that `model` has the lowest loss at every size; undecided while sizes are missing and none was lost.

    Runs stop at the target, so two losses below it are equal. NaN loses against any number.
    """
    compared, lost, scores = [], [], {}
    for size in results.sizes(model):
        rivals = {other: results.mean(other, size) for other in others if results.of(other, size)}
        if not rivals:
            continue
        compared.append(size)
        mine = results.mean(model, size)
        better = {o: x for o, x in rivals.items() if not mine <= max(x, TARGET) and not math.isnan(x)}
        nearest = min(rivals, key=lambda other: math.inf if math.isnan(rivals[other]) else rivals[other])
        scores[size] = f"{show(mine)} against {show(rivals[nearest])}" + (
            f" of {LABELS[nearest]}" if len(others) > 1 else ""
        )
        if better or math.isnan(mine):
            lost.append(size)
    if not compared:
        return not_run(text, paper)
    ran = [other for other in others if results.sizes(model, other)]
    missing = "" if len(ran) == len(others) else f" (only {len(ran)} of {len(others)} rivals run)"
    absent = len(results.sizes()) - len(compared)
    holds = False if lost else None if absent else True
    missing += f"; {absent} values of S not run" if absent else ""
    if len(compared) == 1:
        return Claim(text, scores[compared[0]] + missing, paper, holds)
    won = f"{len(compared) - len(lost)} of" if lost else "all"
    ours = f"at {won} {len(compared)} values of S{missing}"
    if lost:
        ours += "; not at " + ", ".join(f"S = {size} ({scores[size]})" for size in lost[:3])
        ours += f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return Claim(text, ours, paper, holds)
