"""Lines of text through a translation model: any number of them, in batches of like length, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from fastweights.common.sharding import is_sharded
from fastweights.data.pairs.bpe import EOS, PAD, PairTokenizer
from fastweights.inference.beam import Search, beam_search
from fastweights.inference.capture import CapturedStep
from fastweights.models.translation import Encoded, TranslationModel, TranslationState

# Beams, and tokens of source with their padding, that are searched at once where nobody says: a GPU takes a thousand
# rows in little more time than a few, and the features of a token may be ten thousand numbers.
AT_ONCE = {"cpu": (256, 8_192), "cuda": (1024, 32_768)}

Report = Callable[[int, int], None]


class Translation(NamedTuple):
    """A line as it was translated, with log p and the score that decided."""

    text: str
    log_prob: float
    score: float


def translate(
    model: TranslationModel,
    tokenizer: PairTokenizer,
    lines: Sequence[str],
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    batch: int | None = None,
    max_length: int | None = None,
    device: str | torch.device | None = None,
    graph: bool | None = None,
    report: Report = lambda done, total: None,
) -> list[str]:
    """Return the best translation of every line, "" for an empty one. Without `device` the model is not moved."""
    search = Search(beam=beam, length_penalty=length_penalty, max_length=max_length)
    ranked = n_best(model, tokenizer, lines, search, batch=batch, device=device, graph=graph, report=report)
    return [translations[0].text if translations else "" for translations in ranked]


@torch.no_grad()
def n_best(
    model: TranslationModel,
    tokenizer: PairTokenizer,
    lines: Sequence[str],
    search: Search,
    *,
    batch: int | None = None,
    device: str | torch.device | None = None,
    graph: bool | None = None,
    decoder: TranslationModel | CapturedDecoder | None = None,
    report: Report = lambda done, total: None,
) -> list[list[Translation]]:
    """Return the n best translations of every line, best first, none for an empty one.

    Lines of like length are searched together, the longest first, `batch` at a time or as many as suit the device;
    `report` is told how many are done of how many. With `graph` steps are CUDA graphs, for fast weights in the decoder
    and on a GPU; by default they are wherever they can be. A `decoder` that has served other lines keeps its graphs.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch must be at least 1 line, got {batch}")
    if device is not None:
        model.to(device)
    if decoder is None:
        decoder = _decoder(model, graph)
    device, training = model.embedding.weight.device, model.training
    model.eval()
    results: list[list[Translation]] = [[] for _ in lines]
    wanted = [i for i, line in enumerate(lines) if line.strip()]
    rows = dict(zip(wanted, tokenizer.encode_batch([lines[i] for i in wanted]), strict=True))
    wanted.sort(key=lambda i: -len(rows[i]))
    try:
        start = 0
        while start < len(wanted):
            count = batch or lines_at_once(device, search.beam, len(rows[wanted[start]]) + 1)
            numbers = wanted[start : start + count]
            start += len(numbers)
            source, mask = pad_sources([rows[i] for i in numbers])
            ranked = beam_search(decoder, source.to(device), mask.to(device), search)
            texts = (tokenizer.decode(h.tokens) for hypotheses in ranked for h in hypotheses)
            for i, hypotheses in zip(numbers, ranked, strict=True):
                # A line stays a line, whatever an untrained model writes.
                results[i] = [Translation(next(texts).replace("\n", " "), h.log_prob, h.score) for h in hypotheses]
            report(start, len(wanted))
    finally:
        model.train(training)
    return results


def stream(
    model: TranslationModel,
    tokenizer: PairTokenizer,
    groups: Iterable[Sequence[str]],
    search: Search,
    *,
    batch: int | None = None,
    graph: bool | None = None,
) -> Iterator[list[Translation]]:
    """Translate lines without end, in their order, as `n_best` does: each group before the next is asked for."""
    decoder = _decoder(model, graph)
    for lines in groups:
        yield from n_best(model, tokenizer, lines, search, batch=batch, decoder=decoder)


def _decoder(model: TranslationModel, graph: bool | None) -> TranslationModel | CapturedDecoder:
    """Return what `beam_search` decodes with: with steps as CUDA graphs, or as they come."""
    reason = refusal(model, model.embedding.weight.device)
    if graph and reason:
        raise ValueError(f"graph = True cannot be had: {reason}")
    return model if reason or graph is False else CapturedDecoder(model)


class CapturedDecoder:
    """A translation model whose decoder is captured: for `beam_search`, which asks nothing else of a model.

    As sentences leave the search the graph continues with the rows that are left; when they are fewer than half, it is
    captured again. A source read through softmax is kept token by token: another length of it is another graph.
    """

    def __init__(self, model: TranslationModel) -> None:
        self.model = model
        self._captured: CapturedStep | None = None

    def encode(self, source: Tensor, mask: Tensor | None = None) -> TranslationState:
        """Encode as the model does."""
        return self.model.encode(source, mask)

    def step(self, token: Tensor, state: TranslationState) -> tuple[Tensor, TranslationState]:
        """Step as the model does; what comes back lies in the graph's memory until the next step."""
        if isinstance(state.source, Encoded) or state.past is None:
            return self.model.step(token, state)
        captured = self._captured
        if captured is None or not captured.fits(token, state) or 2 * len(token) < captured.rows:
            # The old one first: two of them need not fit into memory.
            self._captured = captured = None
            self._captured = captured = CapturedStep(self.model.step, token, state)
        return captured(token, state)


def refusal(model: TranslationModel, device: torch.device) -> str | None:
    """Say why the steps of the model cannot be captured on the device; what it keeps of a source never grows."""
    if model.config.decoder == "softmax":
        return "decoder 'softmax' has a state that grows with every token; leave it out"
    started = distributed.is_available() and distributed.is_initialized()
    # FSDP gathers weights also where there is one process.
    if is_sharded(model.embedding.weight) or (started and distributed.get_world_size() > 1):
        return "processes share the model, and what they tell each other is not captured; leave it out"
    return None if device.type == "cuda" else f"a CUDA graph needs a CUDA device, and this is {device}; leave it out"


def lines_at_once(device: torch.device, beam: int, longest: int) -> int:
    """Return how many lines of up to `longest` tokens a batch has where nobody says."""
    rows, tokens = AT_ONCE.get(device.type, AT_ONCE["cpu"])
    return max(1, min(rows // beam, tokens // longest))


def pad_sources(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return sentences with their ends as one tensor (B, S), padded on the right, and where its tokens are (B, S)."""
    lengths = torch.tensor([len(row) + 1 for row in rows])
    longest = int(lengths.max())
    source = torch.tensor([[*row, EOS, *[PAD] * (longest - len(row) - 1)] for row in rows], dtype=torch.int64)
    return source, torch.arange(longest) < lengths.unsqueeze(1)
