"""Table 6: which m of the Performer and which ν of DPFP give one and the same d_dot [App. E].

Nothing is trained. A cell maps keys of size 64 with the library's own feature map, with the paper's hyper-parameter,
and counts the entries of what comes out. A size is the d_dot that the paper gives for it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fastweights.experiments.engine.experiment import NOT_RUN, Claim, Results, Scale, Table
from fastweights.experiments.engine.runner import measured
from fastweights.feature_maps import feature_map

D_KEY = 64
# Feature map and name of the hyper-parameter of each model, and the paper's value for each d_dot.
MAPS = {"performer": ("favor", "m"), "dpfp": ("dpfp", "nu")}
PAPER = {"performer": {256: 128, 384: 192, 512: 256}, "dpfp": {256: 2, 384: 3, 512: 4}}
LABELS = {"performer": "Performer, m", "dpfp": "DPFP, ν"}
FORMULAS = {"performer": "d_dot = 2 m", "dpfp": "d_dot = 2 ν d_key"}
SIZES = tuple(PAPER["dpfp"])
SCALES = {name: Scale(sizes=SIZES, cost="1 s") for name in ("smoke", "small", "code", "paper")}


def configure(scale: str, model: str, size: int, seed: int) -> Mapping[str, Any]:
    name = MAPS[model][1]
    entries = {"scale": scale, "model": model, "rule": "none", "size": size, "seed": seed}
    return {**entries, "d_key": D_KEY, name: PAPER[model][size]}


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameter, and the number of entries of a key mapped with it."""
    kind, name = MAPS[config["model"]]
    mapped = feature_map(kind, d_key=config["d_key"], **{name: config[name]})(torch.ones(1, config["d_key"]))
    return {"value": config[name], "d_dot": mapped.shape[-1]}


def claims(results: Results) -> list[Claim]:
    return [_claim(results, model) for model in MAPS]


def _claim(results: Results, model: str) -> Claim:
    symbol = LABELS[model].split(", ")[1]
    text = f"{LABELS[model].split(',')[0]}: {FORMULAS[model]}"
    paper = ", ".join(f"{symbol} = {value}: {size}" for size, value in PAPER[model].items())
    found = {record.metrics["value"]: record.metrics["d_dot"] for record in results.of(model)}
    if not found:
        return Claim(text, NOT_RUN, paper, None)
    ours = ", ".join(f"{symbol} = {value}: {size}" for value, size in found.items())
    wrong = [value for size, value in PAPER[model].items() if found.get(value, size) != size]
    complete = set(PAPER[model].values()) <= found.keys()
    return Claim(text, ours, paper, False if wrong else True if complete else None)


def table(results: Results) -> Table:
    """Return the paper's table: d_dot in the header, hyper-parameters below, and our size where it differs."""
    rows = []
    for model, label in LABELS.items():
        found = {record.config["size"]: record.metrics for record in results.of(model)}
        entries = [_entry(found.get(size), size) for size in SIZES]
        rows.append((label, *entries))
    return Table(("d_dot", *map(str, SIZES)), tuple(rows))


def _entry(metrics: Mapping[str, Any] | None, size: int) -> str:
    if metrics is None:
        return ""
    return str(metrics["value"]) if metrics["d_dot"] == size else f"{metrics['value']} (gives {metrics['d_dot']})"


EXPERIMENT = measured(
    measure,
    name="table6",
    title="From hyper-parameters to the size of φ(k)",
    where="Table 6, App. E",
    statement="Relation between dot product space dimension and the hyper-parameters in the Performer and our DPFP "
    "models. d_key = 64 in all our translation models.",
    models=LABELS,
    scales=SCALES,
    configure=configure,
    claims=claims,
    table=table,
    stored={"metrics": {"value": int, "d_dot": int}},
    size_name="d_dot",
)
