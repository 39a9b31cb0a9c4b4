"""`fastweights bench mt`: translation models with linear and softmax attention, training and decoding, side by side.

All are measured at the same source lengths in the same run, with random weights and tokens: neither the time of an
update nor that of a token depends on what they are. The vocabulary has as many words as the preset is trained with.
Decoding is by steps of the model, a token for each of `BEAM` hypotheses of a sentence.

    train_tokens_per_s   target tokens an update of Adam gets through, sources and targets of that length
    fast_...             the same in bfloat16, compiled, each update a CUDA graph, on a GPU
    encode_ms            reading a batch of sources
    step_ms              one more token, with a source of that length and as long a target before it
    sentences_per_s      sources of that length to translations of `NEW` tokens, from the reading on
    state_bytes          what a sentence holds while it is decoded, with as long a target
    captured_...         the same with steps as CUDA graphs, for fast weights on a GPU
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import Tensor

from fastweights.benchmarks.record import Out, Record, Repeats
from fastweights.benchmarks.timing import median_seconds
from fastweights.commands.options import (
    PRECISIONS,
    AsJson,
    Device,
    chosen_names,
    input_errors,
    option,
    pick_device,
    require,
)
from fastweights.common.tables import check_name, look_up
from fastweights.data.pairs.corpus import PairBatch
from fastweights.inference.translate import CapturedDecoder, refusal
from fastweights.models.translation import TranslationModel
from fastweights.models.translation_config import ATTENTIONS, TranslationModelConfig
from fastweights.models.translation_presets import PRESETS, SUBWORDS
from fastweights.training.engine.capture import WARMUP_UPDATES
from fastweights.training.engine.config import TrainingPlan
from fastweights.training.engine.distributed import launch
from fastweights.training.engine.learner import Learner
from fastweights.training.tasks.translation import TranslationTask, plan_translation

LENGTHS = (32, 512, 4096)
BEAM = 4
NEW = 32
SEED = 0
# Tokens of a training batch, and sentences decoded at once.
SIZES = {"cpu": (4096, 4), "cuda": (16_384, 32)}
# Words of what each preset is trained on: WMT14, and the number words.
WORDS = {"big": SUBWORDS, "base": SUBWORDS, "quick": 400, "tiny": 400}
# Tokens of a sentence that are decoded at once on the way to a state: 4,096 of 32 have logits of 17 gigabytes.
PIECE = 512
FAST = {"precision": "bf16-mixed", "compile": "default", "graph": True}
# What the table shows under which heading, in which unit.
COLUMNS = {
    "train": ("train_tokens_per_s", 1e3),
    "fast": ("fast_train_tokens_per_s", 1e3),
    "step": ("step_ms", 1.0),
    "as graph": ("captured_step_ms", 1.0),
    "out": ("sentences_per_s", 1.0),
    "with graph": ("captured_sentences_per_s", 1.0),
    "state": ("state_bytes", 1e3),
}
# Every attention is compiled for itself, and some of them for short and for long sentences.
COMPILED = 64


class OneBatch(TranslationTask):
    """Training on one batch, again and again."""

    def __init__(self, plan: TrainingPlan[TranslationModelConfig], batch: PairBatch) -> None:
        self.model, self._batch = plan.model, batch
        self.label_smoothing = plan.task["label_smoothing"]

    def batch(self, index: int, rank: int, world: int) -> PairBatch:
        """Return the batch."""
        return self._batch


def random_tokens(preset: str, rows: int, length: int) -> Tensor:
    """Draw words of the preset, without those that have a meaning of their own."""
    return torch.randint(4, WORDS[preset], (rows, length), generator=torch.Generator().manual_seed(SEED))


def train(attention: str, length: int, preset: str, device: str, repeats: int, **way: Any) -> float:
    """Return target tokens per second of updates on one batch of sources and targets of that length."""
    plan = plan_translation(
        WORDS[preset], preset=preset, attention=attention, accelerator=torch.device(device).type, seed=SEED, **way
    )
    count = max(1, SIZES[torch.device(device).type][0] // length)
    tokens = random_tokens(preset, count, length).to(device)
    whole = torch.ones_like(tokens, dtype=torch.bool)
    task = OneBatch(plan, PairBatch(tokens, whole, tokens, tokens, whole))
    learner = Learner(launch(plan.training), task, plan.training)
    # The first of a shape, those that lead up to a capture, and the capture.
    for _ in range(WARMUP_UPDATES + 2):
        learner.advance()
    return count * length / median_seconds(learner.advance, repeats, device)


class TimedDecoder:
    """One model at one length, and what is measured of its decoding."""

    def __init__(self, attention: str, length: int, preset: str, device: str, autocast: bool) -> None:
        torch.manual_seed(SEED)
        self.device, self.autocast = torch.device(device), autocast
        self.model = TranslationModel(PRESETS[preset](attention, vocab_size=WORDS[preset])).to(device).eval()
        self.captured = None if refusal(self.model, self.device) else CapturedDecoder(self.model)
        self.sentences = SIZES[self.device.type][1]
        self.source = random_tokens(preset, self.sentences, length).to(device)
        self.beams = torch.arange(self.sentences, device=device).repeat_interleave(BEAM)

    def precision(self) -> torch.autocast:
        """Return the context with bfloat16 in the matrix products where asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    @torch.no_grad()
    def encode(self) -> Any:
        """Read the sources, down to the memories that the decoder keeps of them."""
        with self.precision():
            return self.model.decode(self.source[:, :1], self.model.encode(self.source))[1].reorder(self.beams)

    @torch.no_grad()
    def decoded(self) -> Any:
        """Return the state after as long a target as the source, for `BEAM` hypotheses of each sentence."""
        with self.precision():
            state = self.model.encode(self.source)
            for piece in self.source.split(PIECE, 1):
                state = self.model.decode(piece, state)[1]
        return state.reorder(self.beams)

    @torch.no_grad()
    def step(self, state: Any, count: int = 1, captured: bool = False) -> Any:
        """Decode `count` more tokens of every hypothesis."""
        decoder = self.captured if captured and self.captured is not None else self.model
        token = self.source[self.beams, 0]
        with self.precision():
            for _ in range(count):
                log_p, state = decoder.step(token, state)
                token = log_p.argmax(-1)
        return state

    def translate(self, captured: bool = False) -> None:
        """Translate the sources to `NEW` tokens each, with `BEAM` hypotheses that never change places."""
        self.step(self.encode(), NEW - 1, captured)


def measure(attention: str, length: int, preset: str, device: str, precision: str, repeats: int) -> dict[str, Any]:
    """Return the row of one model at one length."""

    def seconds(function: Callable[[], object]) -> float:
        return median_seconds(function, repeats, device)

    speed = {"train_tokens_per_s": train(attention, length, preset, device, repeats, precision=PRECISIONS[precision])}
    if device != "cpu":
        speed["fast_train_tokens_per_s"] = train(attention, length, preset, device, repeats, **FAST)
        torch.cuda.empty_cache()
    timed = TimedDecoder(attention, length, preset, device, precision == "bf16")
    state = timed.decoded()
    row = {
        "attention": attention,
        "source_length": length,
        **speed,
        "sentences": timed.sentences,
        "encode_ms": 1e3 * seconds(timed.encode),
        "step_ms": 1e3 * seconds(lambda: timed.step(state, 8)) / 8,
        "sentences_per_s": timed.sentences / seconds(timed.translate),
        "state_bytes": state.nbytes // timed.sentences,
    }
    if timed.captured is not None:
        row["captured_step_ms"] = 1e3 * seconds(lambda: timed.step(state, 8, True)) / 8
        row["captured_sentences_per_s"] = timed.sentences / seconds(lambda: timed.translate(True))
    return row


@input_errors((ValueError, ImportError, OSError))
def run(
    out: Out = None,
    preset: Annotated[str, option(f"One of {', '.join(PRESETS)}.")] = "base",
    attentions: Annotated[str, option(f"Attentions, from {', '.join(ATTENTIONS)}.")] = "softmax,linear",
    device: Device = "auto",
    precision: Annotated[str, option("fp32 or bf16, in decoding and plain training.")] = "fp32",
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time training and decoding of translation models with linear and softmax attention at three source lengths."""
    require("lightning_fabric")
    look_up(PRESETS, preset, "preset")
    check_name(("fp32", "bf16"), precision, "precision")
    device, names = pick_device(device), chosen_names(ATTENTIONS, attentions, "attention")
    torch._dynamo.config.recompile_limit = COMPILED
    record = Record("mt", device, SEED, out, as_json)
    about = {"preset": preset, "words": WORDS[preset], "precision": precision, "beam": BEAM, "new_tokens": NEW}
    for length in LENGTHS:
        for attention in names:
            record.console.print(f"measuring {attention} at source length {length}", style="dim")
            try:
                found = measure(attention, length, preset, device, precision, repeats)
            except torch.OutOfMemoryError:
                record.console.print(f"{attention} at source length {length} does not fit into memory")
                found = {"attention": attention, "source_length": length, "out_of_memory": True}
            record.add(found | about)
    table = Table("source", "", *COLUMNS, title=f"{preset}, {precision}")
    for row in record.rows:
        values = [f"{row[name] / unit:,.1f}" if name in row else "-" for name, unit in COLUMNS.values()]
        table.add_row(str(row["source_length"]), row["attention"], *values)
    record.finish(table, "train: thousand tokens/s; step: ms; out: sentences/s; state: KB a sentence")
