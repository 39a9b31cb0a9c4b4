"""Perplexity under the three protocols of Sec. 6.3.

segment   rows of text read L words at a time, as validation during training does it: quick, but the first words of a
          segment have little before them.
sliding   a window of L words moved on by `stride` words, of which only the new ones are scored. With stride 1 every
          word but the first ones is predicted from the L words before it: the numbers of Tables 2, 3 and 5.
carried   segments of L words in which the state of one is carried into the next: the numbers of Table 4.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.common.tables import check_name
from fastweights.common.tree import to_device
from fastweights.data.text.corpus import Segments, TokenStream, Windows
from fastweights.layers.relative import RelativeAttention
from fastweights.models.language_model import LanguageModel, LanguageModelConfig

PROTOCOLS = ("segment", "sliding", "carried")
EVAL_BATCH = 10
# Words in one call of the model, if `batch` does not say how many windows it takes.
_WORDS = {"cpu": 8_192, "cuda": 65_536}
# Table 4 gives the smallest memory, 15 words, segments of one word; the others are as long as their memory.
_SEGMENTS = {15: 1}

Report = Callable[[int, int], None]


class Perplexity(NamedTuple):
    """What a text cost: the sum of -log p in nats, and the number of scored tokens."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nll / self.tokens

    @property
    def ppl(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def bits(self) -> float:
        """Bits a token."""
        return self.loss / math.log(2)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a text is read; `protocol` fills it in for a model.

    Attributes:
        name: "segment", "sliding" or "carried".
        segment: words in a segment or window.
        batch: rows, or windows at once. Windows do not depend on each other; a text laid out in several rows loses the
            context at their beginnings and the words left over at its end.
        stride: words from one window to the next, None without windows.
        carry: whether the state is carried from one segment to the next.
        mem_len, clamp_len: of Transformer-XL, None for other models.
    """

    name: str
    segment: int
    batch: int
    stride: int | None = None
    carry: bool = False
    mem_len: int | None = None
    clamp_len: int | None = None

    @property
    def slug(self) -> str:
        """A name for files, different for what gives different numbers."""
        parts = [self.name, f"L{self.segment}"]
        parts += [f"stride{self.stride}"] if self.stride is not None else [f"batch{self.batch}"]
        parts += [f"memory{self.mem_len}", f"clamp{self.clamp_len}"] if self.mem_len is not None else []
        return "-".join(parts)


def protocol(
    name: str,
    model: LanguageModelConfig,
    trained_segment: int,
    *,
    carried: bool = False,
    segment: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    device: str = "cpu",
) -> Protocol:
    """Make the protocol of that name for a model trained on segments of that length, with its state carried or not.

    Transformer-XL is evaluated with `mem_len` as asked for; its segments are then as long as its memory, or one word
    for the 15 of Table 4. Under "carried" distances above `clamp_len`, by default the length of a segment in training,
    count as that one, as in the authors' evaluation.
    """
    check_name(PROTOCOLS, name, "protocol")
    for option, value in (("segment", segment), ("stride", stride), ("batch", batch), ("clamp_len", clamp_len)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    relative = model.mixer == "relative"
    memory = {"mem_len": mem_len, "clamp_len": clamp_len}
    for option, value in memory.items():
        if value is not None and (not relative or name == "sliding"):
            why = "a sliding window has no memory" if relative else f"mixer {model.mixer!r} has none"
            raise ValueError(f"{option} is the memory of Transformer-XL, and {why}; leave it out")
    if stride is not None and name != "sliding":
        raise ValueError(f"stride is for protocol 'sliding', not {name!r}; leave it out")
    carry = name == "carried" or (name == "segment" and carried)
    if carry:
        check_carried(model)
    if relative and name != "sliding":
        if mem_len is not None and segment is None:
            segment = _SEGMENTS.get(mem_len, max(mem_len, 1))
        memory["mem_len"] = model.mem_len if mem_len is None else mem_len
        # Validation in training leaves the distances as they are in training.
        if clamp_len is None:
            memory["clamp_len"] = model.clamp_len or (trained_segment if name == "carried" else None)
    length = trained_segment if segment is None else segment
    if batch is None:
        windows = max(1, _WORDS.get(torch.device(device).type, 8_192) // length)
        batch = {"segment": EVAL_BATCH, "sliding": windows, "carried": 1}[name]
    step = (stride or 1) if name == "sliding" else None
    return Protocol(name=name, segment=length, batch=batch, stride=step, carry=carry, **memory)


def check_carried(model: LanguageModelConfig) -> None:
    """Refuse a model whose state cannot be carried from segment to segment for ever."""
    if model.mixer == "softmax":
        raise ValueError(
            "a Transformer's state is every word so far, so it cannot be carried through a text; Transformer-XL (xl) "
            "keeps the last ones, fast weights (delta, linear, performer, dpfp) a state of one size; limited context "
            "works for all"
        )
    if model.positions == "sinusoid" and model.position_direction == "backward":
        raise ValueError(
            "positions that run backward from the end of each segment mean nothing to a state that is carried; take "
            "positions 'none', or position_direction 'forward', or limited context"
        )


def measure(
    model: LanguageModel, stream: TokenStream, how: Protocol, report: Report = lambda done, total: None
) -> Perplexity:
    """Sum -log p over the text. `report` is told the tokens scored so far and all of them, after every batch."""
    training, memory = model.training, _memory(model)
    model.eval()
    try:
        if how.mem_len is not None:
            model.set_memory(how.mem_len, how.clamp_len)
        with torch.no_grad():
            if how.name == "sliding":
                windows = stream.windows(how.segment, how.stride or 1, batch=how.batch)
                losses, total = _of_windows(model, windows), windows.predictions
            else:
                segments = stream.segments(how.batch, how.segment)
                losses, total = _of_segments(model, segments, how.carry), segments.predictions
            # One sum on the device: nothing waits for it before the end.
            nll, done = torch.zeros((), dtype=torch.float64, device=model.softmax.weight.device), 0
            for batch in losses:
                nll += batch.double().sum()
                done += batch.numel()
                report(done, total)
            return Perplexity(float(nll), done)
    finally:
        model.train(training)
        if memory is not None:
            model.set_memory(*memory)


def _of_segments(model: LanguageModel, segments: Segments, carry: bool) -> Iterator[Tensor]:
    """Yield the losses of each segment, which with `carry` continues the state of the one before."""
    device, state = model.softmax.weight.device, None
    for segment in segments:
        inputs, targets, _, starts = to_device(segment, device)
        losses, after = model.loss(inputs, targets, state, starts)
        state = after if carry else None
        yield losses


def _of_windows(model: LanguageModel, windows: Windows) -> Iterator[Tensor]:
    """Yield the losses of each batch of windows, at the positions that are scored."""
    device = model.softmax.weight.device
    for window in windows:
        inputs, targets, starts = to_device(window, device)
        hidden, _ = model(inputs, starts=starts)
        # The softmax costs more than the rest of the model, and most positions were scored in earlier windows.
        yield model.softmax(hidden[:, -targets.shape[1] :], targets)


def _memory(model: LanguageModel) -> tuple[int, int | None] | None:
    layers = (module for module in model.modules() if isinstance(module, RelativeAttention))
    return next(((layer.mem_len, layer.clamp_len) for layer in layers), None)
