"""`fastweights bench lm`: words a second, and is the fast way of training the same function as the plain one?

Each model is trained in two ways by the `Learner` that `fastweights train lm` uses: "plain", in float32, operation by
operation, with the dense softmax; and "fast", in bfloat16 with float32 weights, compiled, each update a CUDA graph.
Before anything is timed, their first losses are compared, from the same weights and without dropout. "stock" is what
PyTorch's own parts can do, compiled, for a baseline in the same run; its softmax is not tied, so its losses are others.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from fastweights.benchmarks.record import Out, Record
from fastweights.benchmarks.timing import attempt, kernel_times, seconds
from fastweights.commands.options import AsJson, chosen_names, input_errors, option, require
from fastweights.common.tables import look_up
from fastweights.data.text.corpus import Corpus, TokenStream
from fastweights.data.tokenizer import WordTokenizer
from fastweights.experiments.engine.runner import start_afresh
from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.layers.feedforward import FeedForward
from fastweights.models.language_model import LanguageModel
from fastweights.models.presets import PRESETS, RECIPES
from fastweights.training.engine.capture import WARMUP_UPDATES
from fastweights.training.engine.distributed import launch
from fastweights.training.engine.learner import Learner
from fastweights.training.tasks.language import LanguageTask, assemble

# Name -> mixer and rule of `assemble`.
MODELS: dict[str, dict[str, str]] = {
    "transformer": {"mixer": "transformer"},
    "linear": {"mixer": "linear"},
    "delta": {"mixer": "delta"},
    "performer": {"mixer": "performer"},
    "performer-delta": {"mixer": "performer", "rule": "delta"},
    "dpfp": {"mixer": "dpfp"},
    "dpfp-delta": {"mixer": "dpfp", "rule": "delta"},
    "xl": {"mixer": "xl"},
}


class StockSoftmax(nn.AdaptiveLogSoftmaxWithLoss):
    """PyTorch's adaptive softmax, which cannot share its words with an embedding."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """Return -log p(target) for hidden (B, T, d_model) and targets (B, T)."""
        return -super().forward(hidden.flatten(0, 1), targets.flatten()).output.view_as(targets)


def with_stock_softmax(model: LanguageModel) -> None:
    """Give the model PyTorch's adaptive softmax, and an embedding beside it."""
    config = model.config
    model.softmax = StockSoftmax(config.d_model, config.vocab_size, list(config.cutoffs), div_value=1.0, head_bias=True)  # type: ignore[assignment]
    model.embedding = nn.Embedding(config.vocab_size, config.d_model)
    nn.init.normal_(model.embedding.weight, std=config.init_std)


class Way(NamedTuple):
    """A way of training: its settings, backends that layers must take, and another change to the model."""

    settings: Mapping[str, Any]
    backends: Mapping[type[nn.Module], str] = {}
    change: Callable[[LanguageModel], None] | None = None


# "torch" is plain without any kernel of ours, "stock" has none but the memory's. "default" is what
# `train lm` does without options.
WAYS: dict[str, Way] = {
    "torch": Way(
        {"precision": "32-true"},
        {AdaptiveSoftmax: "dense", FeedForward: "dense", FastWeightAttention: "chunked"},
    ),
    "plain": Way({"precision": "32-true"}, {AdaptiveSoftmax: "dense"}),
    "default": Way({"precision": "32-true"}),
    "bf16": Way({"precision": "bf16-mixed"}),
    "graph": Way({"precision": "bf16-mixed", "graph": True}),
    "compiled": Way({"precision": "bf16-mixed", "compile": "default"}),
    "fast": Way({"precision": "bf16-mixed", "compile": "default", "graph": True}),
    "stock": Way({"precision": "bf16-mixed", "compile": "default"}, {FeedForward: "dense"}, with_stock_softmax),
}
# Words 1 to 13,000 fall off as 1 / rank, rarer ones as 1 / rank²: 93 % in the head of 20,000, 3.5, 2.8 and 0.2 % in the
# clusters after it, against 93, 3, 3 and 0.3 % in real text.
ZIPF_BREAK, ZIPF_SHIFT = 13_000, 2.7
# The relative difference of losses that 8 bits of mantissa excuse.
AGREEMENT = 1e-2
SEED = 1111

Gpu = Annotated[str, option("cuda or cpu.")]


def zipf(words: int, count: int) -> Tensor:
    """Draw `count` random words with about the frequencies of text."""
    rank = torch.arange(1, words + 1, dtype=torch.float64) + ZIPF_SHIFT
    p = torch.where(rank < ZIPF_BREAK, 1 / rank, ZIPF_BREAK / rank**2)
    draws = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    return torch.searchsorted((p / p.sum()).cumsum(0), draws).clamp(max=words - 1).int()


@cache
def random_corpus(size: str) -> Corpus:
    """Make a corpus of `zipf` words for a preset, long enough for every update of the benchmark."""
    recipe, words = RECIPES[size], PRESETS[size]().vocab_size
    streams = [TokenStream(zipf(words, n * recipe["batch_size"] * recipe["segment"])) for n in (64, 2, 2)]
    manifest = {"name": "zipf", "vocabulary": {"sha256": ""}, "splits": {}}
    return Corpus(Path("zipf"), manifest, WordTokenizer([f"w{n}" for n in range(words)]), *streams)


def make(corpus: Corpus, size: str, model: str, way: str, device: str, **changes: Any) -> Learner:
    """Build the model of that name in that way of training, ready for its first update."""
    chosen = look_up(WAYS, way, "way of training")
    choice: dict[str, Any] = look_up(MODELS, model, "model")
    usual: dict[str, Any] = {"steps": 10_000, "accelerator": device, "seed": SEED}
    task, config = assemble(corpus, preset=size, **{**choice, **usual, **chosen.settings, **changes})
    _build_as(task, chosen)
    return Learner(launch(config), task, config)


def _build_as(task: LanguageTask, way: Way) -> None:
    build = task.build

    def changed() -> LanguageModel:
        model = build()
        for module in model.modules():
            if type(module) in way.backends:
                module.backend = way.backends[type(module)]  # type: ignore[assignment]
        if way.change is not None:
            way.change(model)
        return model

    task.build = changed  # type: ignore[method-assign]


def first_losses(learner: Learner, count: int) -> list[float]:
    """Return the losses of the first updates."""
    losses = []
    for _ in range(count):
        learner.advance()
        losses.append(learner.read()["loss"])
    return losses


def agreement(
    corpus: Corpus, size: str, model: str, ways: Sequence[str], device: str, count: int, **changes: Any
) -> dict[str, Any]:
    """Compare the first losses of each way, without dropout, with those of the first way."""
    losses = {}
    for way in ways:
        losses[way] = first_losses(make(corpus, size, model, way, device, dropout=0.0, **changes), count)
        start_afresh(device)
    off = {way: furthest(losses[way], losses[ways[0]]) for way in ways[1:]}
    return {"losses": losses, "largest_difference": off, "agree": all(x <= AGREEMENT for x in off.values())}


def furthest(losses: Sequence[float], exact: Sequence[float]) -> float:
    """Return the largest relative difference; infinite where one is not a number, which `max` would pass over."""
    off = [abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True)]
    return math.inf if any(map(math.isnan, off)) else max(off)


def measure(learner: Learner, steps: int, blocks: int = 5) -> dict[str, Any]:
    """Measure an update: the median over `blocks` blocks of `steps`, words a second, peak memory, and its kernels."""
    cuda = learner.device.type == "cuda"
    start = time.perf_counter()
    if cuda:
        # Before the recording: a graph holds its memory, and its replays allocate none.
        torch.cuda.reset_peak_memory_stats()
    # The first of an epoch, the first of full length, the rehearsals, the recording.
    for _ in range(WARMUP_UPDATES + 4):
        learner.advance()
    words = learner.read()["tokens"] / (WARMUP_UPDATES + 4)
    first = time.perf_counter() - start

    def block() -> None:
        for _ in range(steps):
            learner.advance()

    times = [seconds(block, learner.device) / steps for _ in range(blocks)]
    median = statistics.median(times)
    result: dict[str, Any] = {"step_ms": 1e3 * median, "words_per_s": words / median, "prepare_s": first}
    result |= {"spread_ms": [1e3 * min(times), 1e3 * max(times)], "loss": learner.read()["loss"]}
    if cuda:
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
        result["reserved_bytes"] = torch.cuda.memory_reserved()
        result["kernels"] = kernel_times(learner.advance)
    return result


def case(
    corpus: Corpus, size: str, model: str, ways: Sequence[str], device: str, steps: int, compared: int, segment: int = 0
) -> dict[str, Any]:
    """Measure one model, with a segment that may be other than its recipe's: agreement, then the speed of each way."""
    changes = {"segment": segment} if segment else {}
    row: dict[str, Any] = {"size": size, "model": model, "data": corpus.manifest["name"], **changes}
    same = [way for way in ways if WAYS[way].change is None]
    if compared and len(same) > 1:
        row["agreement"] = attempt(agreement, corpus, size, model, same, device, compared, **changes)
    for way in ways:
        start_afresh(device)
        row[way] = attempt(lambda way=way: measure(make(corpus, size, model, way, device, **changes), steps))
    start_afresh(device)
    return row


@input_errors((ValueError, ImportError, OSError))
def run(
    out: Out = None,
    sizes: Annotated[str, option(f"Sizes, from {', '.join(PRESETS)}.")] = "small",
    models: Annotated[
        str, option(f"Models, from {', '.join(MODELS)}.")
    ] = "transformer,delta,linear,dpfp-delta,performer-delta",
    ways: Annotated[
        str, option(f"Ways of training, from {', '.join(WAYS)}; others are compared with the first.")
    ] = "plain,fast",
    segments: Annotated[str | None, option("Tokens of a segment, such as 64,256.", "those of the preset")] = None,
    corpus: Annotated[Path | None, option("A prepared corpus.", "random words, as frequent as in text")] = None,
    device: Gpu = "cuda",
    steps: Annotated[int, typer.Option(min=1, help="Updates in each of five timed blocks.")] = 20,
    compared: Annotated[int, typer.Option(min=0, help="First losses to compare, without dropout.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Time the training of the paper's language models, plain and fast, and check that both learn the same."""
    check_device(device, "bench lm", "--sizes quick --ways default")
    which = chosen_names(WAYS, ways, "way of training")
    lengths = [0] if segments is None else [int(length) for length in segments.split(",")]
    if segments is not None and min(lengths) < 1:
        raise ValueError(f"segments are of at least 1 token, got {segments}")
    cases = product(chosen_names(RECIPES, sizes, "size"), lengths, chosen_names(MODELS, models, "model"))
    record = Record("lm", device, SEED, out, as_json)
    loaded = None if corpus is None else Corpus.load(corpus)
    for size, length, model in cases:
        text = loaded or random_corpus(size)
        name = f"{size} {model}, segments of {length}" if length else f"{size} {model}"
        record.console.print(f"{name}, on {text.manifest['name']}", style="dim")
        record.add(case(text, size, model, which, device, steps, compared, length))
    record.finish(_table(record.rows, which))
    if not all(_right(row, which) for row in record.rows):
        raise typer.Exit(1)


def check_device(device: str, command: str, options: str) -> None:
    """Raise an error for a device or a package that training needs and that is not there."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"{command} needs a CUDA device, and PyTorch finds none here; "
            f"`fastweights {command} --device cpu {options}` measures on the CPU"
        )
    require("lightning_fabric")


def _right(row: dict[str, Any], ways: Sequence[str]) -> bool:
    return row.get("agreement", {"agree": True}).get("agree", False) and all("failure" not in row[way] for way in ways)


def _table(rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> Table:
    table = Table("size", "model", "", "words/s", "ms a step", "peak GiB", "gain", "first losses differ by")
    for row in rows:
        for way in ways:
            found, first = row[way], row[ways[0]]
            if "failure" in found:
                table.add_row(*_name(row), way, found["failure"])
                continue
            compared = row.get("agreement", {})
            off = compared.get("failure") or compared.get("largest_difference", {}).get(way)
            table.add_row(
                *(*_name(row), way, f"{found['words_per_s']:,.0f}", f"{found['step_ms']:.2f}"),
                f"{found['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in found else "-",
                f"{found['words_per_s'] / first['words_per_s']:.1f} x" if "failure" not in first else "-",
                f"{off:.1e}" if isinstance(off, float) else off or "-",
            )
    return table


def _name(row: dict[str, Any]) -> tuple[str, str]:
    return row["size"], f"{row['model']}, {row['segment']}" if "segment" in row else row["model"]
