"""Words a second and memory of every language model in training [Sec. 6.3, "Complexity, wall clock time, memory"].

Each model makes a few updates of the small configuration, one model after the other, with all cores or the whole GPU to
itself; the median of several stretches counts. The text is drawn by Zipf's law over as many words as WikiText-103 has,
because the adaptive softmax depends on their frequencies: no corpus is needed. Memory is, on a GPU, the most that was
allocated; on a CPU, the most that the process held above what it held before the model was made.

The paper's numbers are of its own CUDA kernels on two V100 in 2021: they say what it found the rules to cost beside
each other, and are not a measure of this library.
"""

import math
import mmap
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from fastweights.data.text.corpus import Corpus, TokenStream
from fastweights.experiments.engine import language_tables
from fastweights.experiments.engine.corpora import WIKITEXT103
from fastweights.experiments.engine.experiment import (
    NOT_RUN,
    Cell,
    CellInputs,
    CellOutcomes,
    Claim,
    Experiment,
    Plot,
    Results,
    Setup,
    Table,
    UserInput,
)
from fastweights.experiments.engine.language_tables import SMALL, SMOKE, LanguageScale
from fastweights.experiments.engine.runner import local_settings, measure_each, start_afresh, training_of
from fastweights.models.language_model import LanguageModelConfig
from fastweights.training.engine.distributed import launch
from fastweights.training.engine.learner import Learner
from fastweights.training.runs.log import memory_in_use
from fastweights.training.tasks.language import FIELDS, LanguageTask

# Words a second in thousands and memory in GB, "for the small LM setting". Those of DPFP and Performer are of Table 5;
# the paper does not say with which rule.
PAPER = {
    "transformer": (33, 17),
    "linear": (66, 13),
    "delta": (63, 14),
    "performer-wide": (57, None),
    "performer-wide-delta": (57, None),
    "dpfp-1": (63, None),
    "dpfp-1-delta": (63, None),
}
LABELS = {
    **language_tables.labels("transformer", "linear", "delta"),
    "performer": "Performer, sum",
    "performer-delta": "Performer, delta",
    "performer-wide": "Performer of Table 5, sum",
    "performer-wide-delta": "Performer of Table 5, delta",
    **language_tables.labels("dpfp-1", "dpfp-1-delta"),
    "delta-norm": "Delta Network, attention norm.",
    "delta-carried": "Delta Network, carried context",
    "xl": "Transformer-XL",
}
MARGINAL = 0.85
"""The delta rule's cost is marginal where it keeps this share of the sum rule's words a second, in as much memory."""

# Of each model: timed stretches, updates of a stretch, words of the vocabulary.
_FEW, _SOME = {"stretches": 1, "updates": 2, "words": 500}, {"stretches": 3, "updates": 8, "words": 5_693}
_FULL = {"stretches": 5, "updates": 20, "words": WIKITEXT103.words}
_PAPER_SIZE = LanguageScale(sizes=(128,), presets={128: "small"}, options=_FULL, cost="10 min on a GPU")
SCALES = {
    "smoke": replace(
        SMOKE, options=_FEW, cost="3 s", note="A few updates: a check that everything runs, not a result."
    ),
    "small": replace(
        SMALL,
        options=_SOME,
        cost="1 min on 2 cores",
        note="The reduced model of the tables at this scale, on whatever this machine is: it decides nothing.",
    ),
    "code": replace(_PAPER_SIZE, note="As scale paper."),
    "paper": replace(_PAPER_SIZE, note="As in training, but for updates only."),
}


def make_inputs(scale: str, request: UserInput) -> CellInputs:
    return CellInputs({"set": dict(request.settings), "device": request.device.partition(":")[0]})


def configure(scale: str, model: str, size: int, seed: int, set: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    at = SCALES[scale].options
    corpus = {"words": at["words"]}
    whole = language_tables.configure(SCALES, scale, model, size, seed, corpus=corpus, set=set)
    unused = ("corpus", "evaluations", "excerpt", "eval_batch", "steps")
    kept = {name: value for name, value in whole.items() if name not in unused}
    return {**kept, "device": device, "stretches": at["stretches"], "updates": at["updates"]}


def configure_as_paper(*place: Any, **given: Any) -> Mapping[str, Any]:
    """Return the cell of the paper, which measured on GPUs."""
    return configure(*place, **{**given, "device": "cuda"})


def run(cells: Sequence[Cell], setup: Setup) -> CellOutcomes:
    """Measure one after the other whatever `jobs` says: they would slow each other down."""
    # What libraries hold once they are in use belongs to none of the models.
    measure({**cells[0].config, "stretches": 1, "updates": 1}, setup.device)
    for cell, outcome in measure_each(cells, partial(measure, device=setup.device)):
        loss = outcome.metrics["last_loss"]
        setup.on_progress(cell, cell.config["updates"], math.nan if loss is None else loss)
        yield cell, outcome


def measure(config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Measure speed and memory of one model's updates; the first ones, which build kernels, do not count."""
    start_afresh(device)
    before = _held(device)
    network = LanguageModelConfig.from_dict(config["network"])
    stretches, updates = config["stretches"], config["updates"]
    tokens = config["segment"] * config["batch_size"]
    corpus = _text(network.vocab_size, tokens * (stretches + 1) * updates + config["batch_size"])
    task = LanguageTask(network, corpus, eval_batch=1, **language_tables.batching(config))
    settings = replace(training_of(config), **local_settings(device, config))
    learner = Learner(launch(settings), task, settings)
    speeds = []
    for _ in range(stretches + 1):
        start = time.perf_counter()
        for _ in range(updates):
            learner.advance()
        # Reading the losses waits for the device.
        found = learner.read()
        speeds.append(found["tokens"] / (time.perf_counter() - start))
    speeds = speeds[1:]
    return {
        "words_per_s": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "memory_bytes": max(0, memory_in_use(torch.device(device)) - before),
        "parameters": task.n_parameters,
        "last_loss": found["loss"],
    }


def _text(words: int, length: int) -> Corpus:
    """Return a text of words drawn by Zipf's law, the frequent ones first; they have no names."""
    generator = torch.Generator().manual_seed(1)
    weights = 1.0 / (torch.arange(words, dtype=torch.float64) + 2.7)
    edges = (weights / weights.sum()).cumsum(0)
    tokens = torch.searchsorted(edges, torch.rand(length, generator=generator, dtype=torch.float64))
    stream = TokenStream(tokens.clamp(max=words - 1).to(torch.int32))
    tokenizer = SimpleNamespace(size=words)
    return cast("Corpus", SimpleNamespace(tokenizer=tokenizer, train=stream, valid=stream, folder="Zipf's law"))


def _held(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated()
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * mmap.PAGESIZE if status.exists() else 0


def claims(results: Results) -> list[Claim]:
    marginal = (
        f"The delta rule keeps at least {MARGINAL:.0%} of the sum rule's words/s in at most 1 / {MARGINAL} its memory"
    )
    faster = "The Linear Transformer and the Delta Network are faster than the Transformer"
    papers = ("63 K against 66 K words/s, 14 against 13 GB", "66 K and 63 K against 33 K words/s")
    found = {model: results.of(model)[0].metrics for model in ("transformer", "linear", "delta") if results.of(model)}
    if len(found) < 3:
        return [Claim(text, NOT_RUN, paper, None) for text, paper in zip((marginal, faster), papers, strict=True)]
    speeds = {model: metrics["words_per_s"] for model, metrics in found.items()}
    memory = {model: metrics["memory_bytes"] for model, metrics in found.items()}
    shown = {model: _thousands(speed) for model, speed in speeds.items()}
    return [
        Claim(
            marginal,
            f"{shown['delta']} against {shown['linear']} words/s, "
            f"{_gib(memory['delta'])} against {_gib(memory['linear'])}",
            papers[0],
            speeds["delta"] >= MARGINAL * speeds["linear"] and memory["linear"] >= MARGINAL * memory["delta"],
        ),
        Claim(
            faster,
            f"{shown['linear']} and {shown['delta']} against {shown['transformer']} words/s",
            papers[1],
            min(speeds["linear"], speeds["delta"]) > speeds["transformer"],
        ),
    ]


def table(results: Results) -> Table:
    header = ("model", "words/s", "slowest to fastest", "memory", "paper, words/s", "paper, memory")
    rows = []
    for model, label in LABELS.items():
        for record in results.of(model):
            m = record.metrics
            speed, memory = PAPER.get(model, (None, None))
            at = "" if record.config["size"] == 128 else " (D = 128)"
            spread = f"{_thousands(m['slowest'])} to {_thousands(m['fastest'])}"
            theirs = (f"{speed} K{at}" if speed else "", f"{memory} GB{at}" if memory else "")
            rows.append((label, _thousands(m["words_per_s"]), spread, _gib(m["memory_bytes"]), *theirs))
    return Table(header, tuple(rows))


def _thousands(speed: float) -> str:
    return f"{speed / 1000:.3g} K"


def _gib(memory: float) -> str:
    return f"{memory / 2**30:.2f} GiB" if memory >= 2**30 else f"{memory / 2**20:.0f} MiB"


def paper(config: Mapping[str, Any]) -> dict[str, Any] | None:
    found = PAPER.get(config["model"]) if config["size"] == 128 else None
    return None if found is None else {"words_per_s": 1000 * found[0], "memory_gb": found[1]}


EXPERIMENT = Experiment(
    name="speed",
    title="Speed and memory of the language models",
    where="Sec. 6.3 (complexity, wall clock time, memory)",
    statement="Linear Transformer with and without our delta update rule: 63 K and 66 K words/sec, and 14 and 13 GB. "
    "The extra resource requirement is thus marginal. They are faster than the regular Transformers implemented in "
    "PyTorch which process 33 K words/sec and require 17 GB memory.",
    models=LABELS,
    scales=SCALES,
    configure=configure,
    configure_as_paper=configure_as_paper,
    describe=lambda config: f"the paper's sizes on {config['device']}",
    run=run,
    claims=claims,
    plot=Plot(kind="bars", x_label="words a second in training"),
    paper=paper,
    table=table,
    make_inputs=make_inputs,
    inputs=("set", "device"),
    decided_by="the paper's sizes on a GPU, at scale paper",
    fields=FIELDS,
    needs=("lightning_fabric",),
    stored={"metrics": dict.fromkeys(("words_per_s", "slowest", "fastest", "memory_bytes"), float)},
    size_name="D",
    fixed_sizes=True,
)
