"""`fastweights bench stream`: the time of one more token after a short and after a long past, and what is held of it.

Untrained models of the paper's sizes, without positions, read random words one by one. A Transformer keeps every key
and value; fast weights keep W, and on a GPU their step is also measured as a CUDA graph. A cache of more than `READ`
tokens is made of copies of a shorter one: to fill it by reading takes minutes, and what it holds does not matter.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from fastweights.benchmarks.record import Out, Record
from fastweights.benchmarks.timing import seconds
from fastweights.commands.options import AsJson, Device, chosen_names, input_errors, option, pick_device
from fastweights.common.tables import look_up
from fastweights.inference.stream import Stream
from fastweights.layers.softmax import KeyValueState
from fastweights.models.language_model import LanguageModel, LanguageModelState
from fastweights.models.presets import MIXER_CHOICES, PRESETS
from fastweights.ops.state import State

# Tokens timed after each past; the median counts.
TIMED = 50
READ = 4096
SEED = 0


def case(size: str, model: str, device: str, pasts: Sequence[int], graph: bool) -> list[dict[str, Any]]:
    """Measure ms for a token and bytes of the state after each past, shortest first."""
    torch.manual_seed(SEED)
    network = LanguageModel(PRESETS[size](mixer=model, positions="none")).to(device)
    stream, rows = Stream(network, graph=graph), []
    words = torch.randint(network.config.vocab_size, (max(pasts) + TIMED + 2,))
    for past in pasts:
        if past > READ and network.config.mixer == "softmax":
            if stream.position < READ:
                stream.feed(words[stream.position : READ])
            stream = Stream(network, _lengthened(stream.snapshot().state, past - 1))
        stream.feed(words[stream.position : past])
        # The first is not like the others: kernels are compiled, the graph is captured.
        times = [seconds_of_a_word(stream, words[past + i : past + i + 1]) for i in range(TIMED + 1)]
        median = statistics.median(times[1:])
        row = {"size": size, "model": model, "graph": graph, "past": past, "ms": 1e3 * median}
        rows.append({**row, "tokens_per_s": 1 / median, "state_bytes": stream.nbytes})
    return rows


def _lengthened(state: Any, length: int) -> LanguageModelState:
    """Return a cache of `length` tokens, made of copies of the given one."""

    def tiled(x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, -(-length // x.shape[1]), 1, 1)[:, :length].clone()

    layers: list[State] = [KeyValueState(tiled(layer.k), tiled(layer.v)) for layer in state.layers]
    return LanguageModelState(layers, torch.full_like(state.position, length))


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw tokens per second over the length of the past."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for (model, graph), group in groupby(rows, lambda row: (row["model"], row["graph"])):
        points = [(row["past"], row["tokens_per_s"]) for row in group]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{model}, CUDA graph" if graph else model)
    axes.set(xscale="log", xlabel="tokens read before", ylabel="tokens per second", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def seconds_of_a_word(stream: Stream, word: torch.Tensor) -> float:
    """Return the seconds from one more word to the next one, which has to be known before it can be read."""
    return seconds(lambda: stream.feed(word).argmax().item(), torch.device("cpu"))


@input_errors((ValueError, OSError))
def run(
    out: Out = None,
    size: Annotated[str, option(f"One of {', '.join(PRESETS)}.")] = "small",
    models: Annotated[
        str, option("Models, from the mixers of `train lm` that stream.")
    ] = "delta,linear,dpfp,transformer",
    device: Device = "auto",
    pasts: Annotated[str, option("Tokens read before the timed ones.")] = "256,4096,65536",
    threads: Annotated[int, typer.Option(min=0, help="Threads on a CPU; 0 for PyTorch's default.")] = 0,
    plot: Annotated[Path | None, option("Draw tokens per second into this file, such as stream.png.", False)] = None,
    as_json: AsJson = False,
) -> None:
    """Time one more word after short and long texts, and count the bytes of the state."""
    device, lengths = pick_device(device), sorted(int(past) for past in pasts.split(","))
    look_up(PRESETS, size, "size")
    names = chosen_names(MIXER_CHOICES, models, "model")
    if lengths[0] < 1 or any(after - before <= TIMED + 1 for before, after in pairwise(lengths)):
        raise ValueError(
            f"pasts are of 1 token at least and more than {TIMED + 1} apart, which are timed; got {lengths}"
        )
    if threads:
        torch.set_num_threads(threads)
    record = Record("stream", device, SEED, out, as_json)
    for model in names:
        captured = device != "cpu" and MIXER_CHOICES[model].mixer == "fast_weight"
        for graph in (False, True) if captured else (False,):
            record.console.print(f"{size} {model}{', captured' if graph else ''}", style="dim")
            record.add(*case(size, model, device, lengths, graph))
    table = Table("model", "", "tokens before", "ms a token", "tokens/s", "state, bytes", title=f"{size}, one row")
    for row in record.rows:
        way = "CUDA graph" if row["graph"] else ""
        numbers = f"{row['ms']:.3f}", f"{row['tokens_per_s']:.1f}", f"{row['state_bytes']:,}"
        table.add_row(row["model"], way, f"{row['past']:,}", *numbers)
    if plot is not None:
        _draw(record.rows, plot)
    record.finish(table)
