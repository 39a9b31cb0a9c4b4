"""`fastweights bench retrieval`: what the exact short cuts of the retrieval experiments gain, on the CPU.

Every form computes the same loss from the same weights; a measurement is a whole training step, sampling left out.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from fastweights.benchmarks.record import Out, Record, Repeats
from fastweights.commands.options import AsJson
from fastweights.data.synthetic import training_batches
from fastweights.models.retrieval import RetrievalModel, half_squared_error
from fastweights.models.retrieval_shortcuts import ShortcutRetrievalModel, pair
from fastweights.training.tasks.retrieval_cell import RetrievalCell, RetrievalConfig

SEED = 1
CELLS = [
    (1, "dpfp-1", 100),
    (1, "dpfp-1", 600),
    (1, "dpfp-3", 600),
    (2, "dpfp-1-delta", 20),
    (2, "dpfp-1-delta", 100),
    (2, "schlag2021", 20),
]


def _from_tables(model: ShortcutRetrievalModel, keys: Tensor | None, values: Tensor, queries: Tensor | None) -> Tensor:
    """Read a memory that is built, as the plain model does, from projections of the S symbols that are looked up."""
    table, q = model.project_symbols(queries)
    k = pair(table, model.value_table, keys, values)
    v = F.one_hot(values, model.size).to(k.dtype)
    return model.read(q, k[..., : model.d_key], v, k[..., model.d_key :])


FORMS: dict[str, Callable[[Any, Tensor | None, Tensor, Tensor | None], Tensor]] = {
    "plain": RetrievalModel.forward,
    "tables": _from_tables,
    "ours": ShortcutRetrievalModel.forward,
}
"""The ways to compute what the queries read, from the plainest on."""


def measure(setting: int, name: str, size: int, repeats: int) -> list[dict[str, Any]]:
    """Return the median seconds of a training step for each form of one cell."""
    rows: list[dict[str, Any]] = []
    config = RetrievalConfig(setting=setting, model=name, size=size, seed=SEED)
    for form, read in FORMS.items():
        cell = RetrievalCell(config)
        generator = torch.Generator().manual_seed(SEED)
        seconds = []
        for batch in training_batches(setting, size, repeats + 1, config.training_batch, generator):
            start = time.perf_counter()
            cell.update(half_squared_error(read(cell.model, *batch[:3]), batch.targets))
            seconds.append(time.perf_counter() - start)
        rows.append(
            {"setting": setting, "model": name, "size": size, "form": form, "step_s": statistics.median(seconds[1:])}
        )
    for row in rows:
        row["gain"] = rows[0]["step_s"] / row["step_s"]
    return rows


def run(out: Out = None, repeats: Repeats = 7, as_json: AsJson = False) -> None:
    """Time a training step of the retrieval experiments with each exact shortcut and without any."""
    record = Record("retrieval", "cpu", SEED, out, as_json)
    torch.set_num_threads(1)
    for setting, name, size in CELLS:
        record.console.print(f"measuring {name} of size {size} in setting {setting}", style="dim")
        record.add(*measure(setting, name, size, repeats))
    table = Table("setting", "model", "S", "form", "ms a step", "gain over plain", title="one thread, float32")
    for row in record.rows:
        cells = (row["setting"], row["model"], row["size"], row["form"])
        table.add_row(*map(str, cells), f"{1e3 * row['step_s']:.1f}", f"{row['gain']:.1f}")
    record.finish(table)
