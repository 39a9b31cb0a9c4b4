"""`fastweights bench retrieval`: what each exact short cut of the retrieval experiments gains, on the CPU.

Every form computes the same loss from the same weights; a measurement is a whole training step, sampling left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from fastweights.benchmarks.record import write_record
from fastweights.data.synthetic import training_batches
from fastweights.models.retrieval import Batch, RetrievalModel
from fastweights.models.retrieval_algebra import pair
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import sum_normalize
from fastweights.ops.state import FastWeightState
from fastweights.training.tasks.retrieval import Cell, RetrievalConfig

Loss = Callable[[RetrievalModel, Batch], Tensor]
SEED = 1
CELLS = [
    (1, "dpfp-1", 100),
    (1, "dpfp-1", 600),
    (1, "dpfp-3", 600),
    (2, "dpfp-1-delta", 20),
    (2, "dpfp-1-delta", 100),
    (2, "schlag2021", 20),
]


def _inputs(model: RetrievalModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of the keys (B, L, ·) and of the query (B, 1, ·), and values (B, L, S) as one-hot vectors."""
    assert batch.queries is not None
    keys = torch.arange(model.size).expand_as(batch.values) if batch.keys is None else batch.keys
    E = model.embedding
    return E[keys], E[batch.queries], F.one_hot(batch.values, model.size).to(E.dtype)


def _by_products(model: RetrievalModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Keys with gates, queries and values, each projection a product with a whole vector: W_K [e(k); v], W_Q e(q)."""
    keys, query, v = _inputs(model, batch)
    W_k = torch.cat([model.key_weight, model.value_table.mT], 1)
    k = F.linear(torch.cat([keys, v], -1), W_k, model.key_bias)
    return k, F.linear(query, model.query_weight, model.query_bias), v


def _by_tables(model: RetrievalModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The same by projecting the S symbols once and looking rows up."""
    keys_table, q = model.project(batch)
    v = F.one_hot(batch.values, model.size).to(q.dtype)
    return pair(keys_table, model.value_table, batch.keys, batch.values), q, v


def _read(model: RetrievalModel, k: Tensor, q: Tensor, v: Tensor, backend: str) -> Tensor:
    """ŷ (B, 1, S) from a memory matrix that is built."""
    k, gate = k.split([model.d_key, k.shape[-1] - model.d_key], -1)
    k, q = model.phi.map(k), model.phi.map(q)
    if model.rule == "sum":
        return q @ (k.mT @ v) / (q @ k.sum(1).unsqueeze(-1) + model.read_eps)
    if model.rule == "delta":
        k, q = sum_normalize(k), q / (q.sum(-1, keepdim=True) + model.read_eps)
    beta = gate.sigmoid()
    first = FastWeightState((k[:, 0].unsqueeze(-1) * (beta[:, 0] * v[:, 0]).unsqueeze(-2)).unsqueeze(1))
    k, v, beta = k[:, 1:].unsqueeze(2), v[:, 1:].unsqueeze(2), beta[:, 1:]
    _, state = fast_weight_memory(k, k, v, rule=model.rule, beta=beta, state=first, backend=backend)
    y = q @ state.W.squeeze(1)
    return F.layer_norm(y, (model.size,)) if model.rule == "schlag2021" else y


def _loss(y: Tensor, batch: Batch) -> Tensor:
    return (y - F.one_hot(batch.targets, y.shape[-1]).to(y.dtype)).square().sum(-1).mean() / 2


def forms(rule: str) -> dict[str, Loss]:
    """The ways to compute a cell's loss, from the plainest on."""
    found: dict[str, Loss] = {
        "plain": lambda model, batch: _loss(_read(model, *_by_products(model, batch), "reference"), batch),
        "tables": lambda model, batch: _loss(_read(model, *_by_tables(model, batch), "reference"), batch),
    }
    if rule == "delta":
        found["tables, chunked"] = lambda model, batch: _loss(_read(model, *_by_tables(model, batch), "chunked"), batch)
    return {**found, "ours": lambda model, batch: model.loss(batch)}


def measure(setting: int, name: str, size: int, repeats: int) -> list[dict[str, Any]]:
    """Median seconds of a training step for each form of one cell."""
    rows: list[dict[str, Any]] = []
    config = RetrievalConfig(setting=setting, model=name, size=size, seed=SEED)
    for form, loss in forms(config.entry.rule).items():
        cell = Cell(config)
        generator = torch.Generator().manual_seed(SEED)
        seconds = []
        for batch in training_batches(setting, size, repeats + 1, config.training_batch, generator):
            start = time.perf_counter()
            value = loss(cell.model, batch)
            for parameter, gradient in zip(cell.parameters, torch.autograd.grad(value, cell.parameters), strict=True):
                parameter.grad = gradient
            cell.optimizer.step()
            seconds.append(time.perf_counter() - start)
        rows.append(
            {"setting": setting, "model": name, "size": size, "form": form, "step_s": statistics.median(seconds[1:])}
        )
    for row in rows:
        row["gain"] = rows[0]["step_s"] / row["step_s"]
    return rows


def run(out: Path | None, repeats: int) -> None:
    """Measure every cell, print the table, and write the JSON file if asked for."""
    start, console = time.perf_counter(), Console()
    torch.set_num_threads(1)
    rows = [row for cell in CELLS for row in measure(*cell, repeats)]
    table = Table("setting", "model", "S", "form", "ms a step", "gain over plain", title="one thread, float32")
    for row in rows:
        cells = (row["setting"], row["model"], row["size"], row["form"])
        table.add_row(*map(str, cells), f"{1e3 * row['step_s']:.1f}", f"{row['gain']:.1f}")
    console.print(table)
    if out is not None:
        write_record(out, "retrieval", "cpu", SEED, start, rows)
        console.print(f"written to {out}")
