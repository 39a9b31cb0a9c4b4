"""`fastweights bench mt`: translation models with linear and softmax attention, training and decoding, side by side.

Both are measured at the same source lengths in the same run, with random weights and tokens: neither the time of an
update nor that of a token depends on what they are. The vocabulary has as many words as the preset is trained with.
Decoding is by steps of the model, a token for each sentence.

    train_tokens_per_s   target tokens an update of Adam gets through, sources and targets of that length
    encode_ms            reading a batch of sources
    step_ms              one more token, with a source of that length and as long a target before it
    sentences_per_s      sources of that length to translations of `NEW` tokens, from the reading on
    state_bytes          what a sentence holds while it is decoded, with as long a target
    recorded_…           the same with steps as CUDA graphs, for fast weights on a GPU
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from rich.table import Table

from fastweights.benchmarks.record import Out, Record, Repeats
from fastweights.benchmarks.timing import median_seconds
from fastweights.commands.options import AsJson, Device, input_errors, option, pick_device
from fastweights.common.tables import look_up
from fastweights.inference.translate import CapturedDecoder, refusal
from fastweights.models.translation import TranslationModel
from fastweights.models.translation_presets import PRESETS, SUBWORDS

LENGTHS = (32, 512, 4096)
ATTENTIONS = ("softmax", "linear")
NEW = 32
SEED = 0
# Tokens of a training batch, and sentences decoded at once.
SIZES = {"cpu": (4096, 4), "cuda": (16_384, 32)}
# Words of what each preset is trained on: WMT14, and the number words.
WORDS = {"big": SUBWORDS, "base": SUBWORDS, "quick": 400, "tiny": 400}
# Tokens of a sentence that are decoded at once on the way to a state: 4,096 of 32 have logits of 17 gigabytes.
PIECE = 512


class TimedModel:
    """One model at one length, and what is measured of it."""

    def __init__(self, attention: str, length: int, preset: str, device: str, autocast: bool) -> None:
        torch.manual_seed(SEED)
        self.device, self.length, self.autocast = torch.device(device), length, autocast
        words = WORDS[preset]
        self.model = TranslationModel(PRESETS[preset](attention, vocab_size=words)).to(device)
        self.captured = None if refusal(self.model, self.device) else CapturedDecoder(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=True)
        tokens, self.sentences = SIZES[self.device.type]
        self.train_rows = max(1, tokens // length)
        self.source = torch.randint(4, words, (max(self.train_rows, self.sentences), length), device=device)

    def precision(self) -> torch.autocast:
        """Return the context with bfloat16 in the matrix products where asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def update(self) -> None:
        """Make one update on sources and targets of that length."""
        rows = self.source[: self.train_rows]
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision():
            losses, _ = self.model.loss(rows, None, rows, rows, 0.1)
        losses.mean().backward()
        self.optimizer.step()

    @torch.no_grad()
    def encode(self) -> Any:
        """Read the sources, down to the memories that the decoder keeps of them."""
        self.model.eval()
        rows = self.source[: self.sentences]
        with self.precision():
            return self.model.decode(rows[:, :1], self.model.encode(rows))[1]

    @torch.no_grad()
    def decoded(self) -> Any:
        """Return the state after as long a target as the source."""
        self.model.eval()
        rows = self.source[: self.sentences]
        with self.precision():
            state = self.model.encode(rows)
            for piece in rows.split(PIECE, 1):
                state = self.model.decode(piece, state)[1]
        return state

    @torch.no_grad()
    def step(self, state: Any, count: int = 1, captured: bool = False) -> Any:
        """Decode `count` more tokens of every sentence."""
        decoder = self.captured if captured and self.captured is not None else self.model
        token = self.source[: self.sentences, 0]
        with self.precision():
            for _ in range(count):
                log_p, state = decoder.step(token, state)
                token = log_p.argmax(-1)
        return state

    def translate(self, captured: bool = False) -> None:
        """Translate the sources to `NEW` tokens each, greedily."""
        self.step(self.encode(), NEW - 1, captured)


def measure(attention: str, length: int, preset: str, device: str, autocast: bool, repeats: int) -> dict[str, Any]:
    """Return the row of one model at one length."""
    timed = TimedModel(attention, length, preset, device, autocast)

    def seconds(function: Callable[[], object]) -> float:
        return median_seconds(function, repeats, device)

    update = seconds(timed.update)
    timed.optimizer.zero_grad(set_to_none=True)
    state = timed.decoded()
    row = {
        "attention": attention,
        "source_length": length,
        "train_rows": timed.train_rows,
        "train_tokens_per_s": timed.train_rows * length / update,
        "sentences": timed.sentences,
        "encode_ms": 1e3 * seconds(timed.encode),
        "step_ms": 1e3 * seconds(lambda: timed.step(state, 8)) / 8,
        "sentences_per_s": timed.sentences / seconds(timed.translate),
        "state_bytes": state.nbytes // timed.sentences,
    }
    if timed.captured is not None:
        row["recorded_step_ms"] = 1e3 * seconds(lambda: timed.step(state, 8, True)) / 8
        row["recorded_sentences_per_s"] = timed.sentences / seconds(lambda: timed.translate(True))
    return row


def run(
    out: Out = None,
    preset: Annotated[str, option(f"One of {', '.join(PRESETS)}.")] = "base",
    device: Device = "auto",
    precision: Annotated[str, option("fp32 or bf16.")] = "fp32",
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time training and decoding of translation models with linear and softmax attention at three source lengths."""
    with input_errors():
        look_up(PRESETS, preset, "preset")
        look_up(dict.fromkeys(("fp32", "bf16")), precision, "precision")
        device = pick_device(device)
    record = Record("mt", device, SEED, out, as_json)
    about = {"preset": preset, "words": WORDS[preset], "precision": precision, "new_tokens": NEW}
    for length in LENGTHS:
        for attention in ATTENTIONS:
            record.console.print(f"measuring {attention} at source length {length}", style="dim")
            try:
                found = measure(attention, length, preset, device, precision == "bf16", repeats)
            except torch.OutOfMemoryError:
                record.console.print(f"{attention} at source length {length} does not fit into memory")
                found = {"attention": attention, "source_length": length, "out_of_memory": True}
            record.add(found | about)
    shown = ("train_tokens_per_s", "encode_ms", "step_ms", "recorded_step_ms", "sentences_per_s", "state_bytes")
    table = Table("source length", "", *(name.replace("_", " ") for name in shown), title=f"{preset}, {precision}")
    for row in record.rows:
        values = [f"{row[name]:,.{'0f' if name == 'state_bytes' else '1f'}}" if name in row else "-" for name in shown]
        table.add_row(str(row["source_length"]), row["attention"], *values)
    record.finish(table)
