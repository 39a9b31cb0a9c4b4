"""`fastweights bench states`: what it costs to keep a stream's fast weights in fewer bits.

A trained language model reads one text word by word, and after every word its fast weights are rounded to each format.
Perplexity is that of the second half of each stretch: of words 129 to 256, ..., 32,769 to 65,536. Formats are rows of
one batch, so that all read the same text; bytes and the time of a word are those of a `Stream`.
"""

import math
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from fastweights.benchmarks.record import Out, Record
from fastweights.benchmarks.stream import seconds_of_a_word
from fastweights.commands.options import AsJson, Device, input_errors, option, pick_device
from fastweights.inference.compression import FORMATS, Compression
from fastweights.inference.stream import Stream
from fastweights.models.language_model import LanguageModel, LanguageModelState
from fastweights.ops.state import FastWeightState, State
from fastweights.training.runs.saved import LanguageRun

# None is the state as it is.
WAYS = [None, *(Compression(name, feedback) for name in FORMATS for feedback in (False, True))]
SHORTEST = 256
# Words whose losses are computed at once, and words timed.
_BLOCK, _TIMED = 256, 200
SEED = 0


def _rounded(state: LanguageModelState) -> LanguageModelState:
    """Round row i of a state as `WAYS[i]` says."""
    layers: list[State] = []
    for layer in state.layers:
        assert isinstance(layer, FastWeightState)
        rows = layer.W.unbind()
        W = torch.stack([x if way is None else way.round(x).unpack(x.dtype) for way, x in zip(WAYS, rows, strict=True)])
        layers.append(FastWeightState(W, layer.z, layer.recent))
    return LanguageModelState(layers, state.position)


@torch.no_grad()
def losses(model: LanguageModel, tokens: Tensor, progress: Any = None) -> Tensor:
    """Return the loss of each token after the first, (ways, T - 1), in nats."""
    state, found, hidden = None, [], []
    rows = tokens.expand(len(WAYS), -1)
    for t in range(len(tokens) - 1):
        y, state = model(rows[:, t : t + 1], state)
        state = _rounded(state)
        hidden.append(y)
        if len(hidden) == _BLOCK or t == len(tokens) - 2:
            targets = rows[:, t + 2 - len(hidden) : t + 2]
            h = torch.cat(hidden, 1)
            found.append(model.softmax(h.flatten(0, 1), targets.flatten()).view(targets.shape).cpu())
            hidden.clear()
            if progress is not None:
                progress(t + 1)
    return torch.cat(found, 1)


def _timed(model: LanguageModel, tokens: Tensor, way: Compression | None) -> tuple[int, float]:
    """Return the bytes of a stream's state, and the median of ms that a word takes."""
    stream = Stream(model)
    if way is not None:
        stream = Stream(model, state_format=way.format, error_feedback=way.error_feedback)
    times = [seconds_of_a_word(stream, word) for word in tokens[:_TIMED].split(1)]
    return stream.nbytes, 1e3 * statistics.median(times[_TIMED // 10 :])


@input_errors((ValueError, OSError))
def run(
    runs: Annotated[list[Path], typer.Argument(help="Folders of trained language models with fast weights.")],
    data: Annotated[Path | None, option("A corpus in their tokens.", "(the one of each run)")] = None,
    split: Annotated[str, option("The part of the corpus that is read.")] = "test",
    tokens: Annotated[int, option("How many words to read, from the first on.")] = 65_536,
    out: Out = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure perplexity, bytes and time of streams whose state is kept in 32, 16 and 8 bits."""
    if tokens < SHORTEST:
        raise ValueError(f"--tokens must be at least {SHORTEST}, got {tokens}")
    record = Record("states", device := pick_device(device), SEED, out, as_json)
    table = Table("run", "state", "bytes", "ms a word", "words", "perplexity")
    for folder in runs:
        opened = LanguageRun.open(folder)
        model, checkpoint = opened.load(device=device)
        if model.config.mixer != "fast_weight":
            raise ValueError(f"{folder} has no fast weights but mixer {model.config.mixer!r}")
        text = opened.corpus(data).split(split).tokens
        if len(text) <= tokens:
            raise ValueError(
                f"--tokens {tokens} is too long: split {split!r} has {len(text)} words; give a smaller number"
            )
        text = text[: tokens + 1].to(device=device, dtype=torch.int64)
        model.eval()

        def show(done: int, name: str = folder.name) -> None:
            record.console.print(f"{name}: {done:,} of {tokens:,} words", style="dim")

        sized = [_timed(model, text, way) for way in WAYS]
        found = losses(model, text, lambda done, show=show: show(done) if done % 8192 == 0 else None)
        for way, (size, ms), row in zip(WAYS, sized, found.double(), strict=True):
            end = SHORTEST
            while end <= tokens:
                record.add(
                    {
                        "run": folder.name,
                        "rule": model.config.rule,
                        "step": checkpoint.step,
                        "corpus": str((data or Path("the run's own")).name),
                        "split": split,
                        "format": "float32" if way is None else way.format,
                        "error_feedback": way is not None and way.error_feedback,
                        "state_bytes": size,
                        "ms": ms,
                        "words": end,
                        "perplexity": math.exp(row[end // 2 : end].mean().item()),
                    }
                )
                end *= 2
            last = record.rows[-1]
            name = last["format"] + (" with error feedback" if last["error_feedback"] else "")
            table.add_row(
                folder.name, name, f"{size:,}", f"{ms:.3f}", f"{last['words']:,}", f"{last['perplexity']:.2f}"
            )
    record.finish(table)
