"""`fastweights bench stream`: the time of one more token after a short and after a long past, and what is held of it.

Untrained models of the paper's sizes, without positions, read random words one by one. A Transformer keeps every key
and value; fast weights keep W, and on a GPU their step is also measured as a CUDA graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
from rich.table import Table

from fastweights.benchmarks.record import Out, Record
from fastweights.commands.options import AsJson, Device, chosen_names, input_errors, option, pick_device
from fastweights.common.tables import look_up
from fastweights.inference.stream import Stream
from fastweights.models.language_model import LanguageModel
from fastweights.models.presets import MIXER_CHOICES, PRESETS

# Tokens timed after each past; the median counts.
TIMED = 50
SEED = 0


def case(size: str, model: str, device: str, pasts: Sequence[int], graph: bool) -> list[dict[str, Any]]:
    """Measure ms for a token and bytes of the state after each past, shortest first."""
    torch.manual_seed(SEED)
    network = LanguageModel(PRESETS[size](mixer=model, positions="none")).to(device)
    stream, rows = Stream(network, graph=graph), []
    words = torch.randint(network.config.vocab_size, (max(pasts) + TIMED + 2,))
    for past in pasts:
        stream.feed(words[stream.position : past])
        # The first is not like the others: kernels are compiled, the graph is recorded.
        times = [_timed(stream, words[past + i : past + i + 1]) for i in range(TIMED + 1)][1:]
        row = {"size": size, "model": model, "graph": graph, "past": past, "ms": 1e3 * statistics.median(times)}
        rows.append({**row, "state_bytes": stream.nbytes})
    return rows


def _timed(stream: Stream, token: torch.Tensor) -> float:
    start = time.perf_counter()
    # A word has to come out before the next can go in.
    stream.feed(token).argmax().item()
    return time.perf_counter() - start


@input_errors((ValueError, OSError))
def run(
    out: Out = None,
    size: Annotated[str, option(f"One of {', '.join(PRESETS)}.")] = "small",
    models: Annotated[
        str, option("Models, from the mixers of `train lm` that stream.")
    ] = "delta,linear,dpfp,transformer",
    device: Device = "auto",
    pasts: Annotated[str, option("Tokens read before the timed ones.")] = "256,4096,65536",
    as_json: AsJson = False,
) -> None:
    """Time one more word after short and long texts, and count the bytes that are kept of them."""
    device, lengths = pick_device(device), sorted(int(past) for past in pasts.split(","))
    look_up(PRESETS, size, "size")
    names = chosen_names(MIXER_CHOICES, models, "model")
    if lengths[0] < 1 or any(after - before <= TIMED + 1 for before, after in pairwise(lengths)):
        raise ValueError(
            f"pasts are of 1 token at least and more than {TIMED + 1} apart, which are timed; got {lengths}"
        )
    record = Record("stream", device, SEED, out, as_json)
    for model in names:
        recorded = device != "cpu" and MIXER_CHOICES[model].mixer == "fast_weight"
        for graph in (False, True) if recorded else (False,):
            record.console.print(f"{size} {model}{', recorded' if graph else ''}", style="dim")
            record.add(*case(size, model, device, lengths, graph))
    table = Table("model", "", "tokens before", "ms a token", "state, bytes", title=f"{size}, one row")
    for row in record.rows:
        way = "CUDA graph" if row["graph"] else ""
        table.add_row(row["model"], way, f"{row['past']:,}", f"{row['ms']:.3f}", f"{row['state_bytes']:,}")
    record.finish(table)
