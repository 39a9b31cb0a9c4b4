"""Beam search over states: what a hypothesis remembers is a row of the decoder's state, and the source is read once.

B sentences, k beams each, V sub-words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastweights.data.pairs.bpe import BOS, EOS, PAD

# What a translation may be longer than its source (Vaswani et al.).
EXTRA_LENGTH = 50


class Hypothesis(NamedTuple):
    """A finished sentence: its tokens without the end, log p with the end, and log p over the length penalty."""

    tokens: list[int]
    log_prob: float
    score: float


class Decoder(Protocol):
    """What the search asks of a model; `TranslationModel` does it."""

    def encode(self, source: Tensor, mask: Tensor | None) -> Any:
        """Return the state after reading sources (B, S)."""
        ...

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return log p (N, V) of the next token, and the state, whose `reorder(rows, sentences)` picks rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to search.

    Attributes:
        beam: hypotheses that are kept at each step, k; 1 is greedy search.
        length_penalty: the exponent α; scores are log p / ((5 + length) / 6)^α, the end counted [Wu et al. 2016].
        n_best: how many finished hypotheses to give, at most k.
        max_length: tokens of a translation, its end included; None for those of the source and 50 more. What is not
            finished by then is ended there.
        early_stop: end a sentence when nothing still open can come among its n best. Changes time, not results.
    """

    beam: int = 4
    length_penalty: float = 0.6
    n_best: int = 1
    max_length: int | None = None
    early_stop: bool = True

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise ValueError(f"beam must be at least 1, got {self.beam}")
        if not 1 <= self.n_best <= self.beam:
            raise ValueError(f"n_best must be from 1 to beam = {self.beam}, got {self.n_best}; widen the beam for more")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a finite number, got {self.length_penalty}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, got {self.max_length}")

    def score(self, log_prob: float, length: int) -> float:
        """Return log p over the penalty of that many tokens."""
        return log_prob / ((5 + length) / 6) ** self.length_penalty


@dataclass
class _Sentence:
    """A sentence that is being searched for: how long it may get, and its finished hypotheses."""

    number: int
    limit: int
    finished: list[Hypothesis] = field(default_factory=list)

    def done(self, length: int, best_open: float, search: Search) -> bool:
        """Say whether it has k finished hypotheses, its full length, or n that no open one can beat."""
        if len(self.finished) >= search.beam or length >= self.limit:
            return True
        if not search.early_stop or len(self.finished) < search.n_best:
            return False
        # log p only falls from here, and the penalty is monotone in the length.
        hope = max(search.score(best_open, length + 1), search.score(best_open, self.limit))
        return sorted((h.score for h in self.finished), reverse=True)[search.n_best - 1] >= hope


@torch.no_grad()
def beam_search(
    model: Decoder, source: Tensor, mask: Tensor | None = None, search: Search | None = None, **options: Any
) -> list[list[Hypothesis]]:
    """Return the n best translations of each source (B, S), best first; `options` are fields of `Search`.

    Equivalent to, for each sentence and V sub-words,

        beams = [([], 0.0)]
        while beams and len(finished) < k:
            longer = sorted(((y + [w], p + log_p(w | y)) for y, p in beams for w in range(V)), by p, falling)
            finished += [(y, p) for y, p in longer[:k] if y ends]
            beams = [(y, p) for y, p in longer if not y ends][:k]
        sorted(finished, by p / penalty, falling)[:n_best]

    An end counts only among the k best of a step, so that k = 1 is greedy search. Sentences that are done leave the
    batch; results do not depend on which others are in it.
    """
    search = search or Search(**options)
    B, k = len(source), search.beam
    lengths = [source.shape[1]] * B if mask is None else mask.sum(1).tolist()
    sentences = [_Sentence(i, search.max_length or length + EXTRA_LENGTH) for i, length in enumerate(lengths)]
    results: list[list[Hypothesis]] = [[] for _ in sentences]
    state = model.encode(source, mask)
    token = source.new_full((B * k,), BOS)
    # All beams of a sentence begin alike; only the first may have children.
    scores = torch.full((B, k), -torch.inf, dtype=torch.float64)
    scores[:, 0] = 0
    history = torch.empty(B, k, 0, dtype=torch.int64)
    length = 0
    while sentences:
        length += 1
        log_p, state = model.step(token, state)
        top, parent, word = _candidates(log_p, scores, [s.limit == length for s in sentences])
        _collect(sentences, search, length, top, parent, word, history)
        # The best k that do not end; 2 k candidates always have that many.
        order = (word == EOS).long().argsort(dim=1, stable=True)[:, :k]
        top, parent, word = (x.gather(1, order) for x in (top, parent, word))
        best_open = top[:, 0].tolist()
        stay = []
        for i, sentence in enumerate(sentences):
            if sentence.done(length, best_open[i], search):
                ranked = sorted(sentence.finished, key=lambda h: -h.score)
                results[sentence.number] = ranked[: search.n_best]
            else:
                stay.append(i)
        left = torch.tensor(stay, dtype=torch.int64)
        rows = (left.unsqueeze(1) * k + parent[left]).flatten()
        history = torch.cat([history.flatten(0, 1)[rows].unflatten(0, (-1, k)), word[left].unsqueeze(-1)], -1)
        scores, token = top[left], word[left].flatten().to(source.device)
        gone = len(left) < len(sentences)
        sentences = [sentences[i] for i in stay]
        if sentences and (gone or not torch.equal(rows, torch.arange(len(rows)))):
            # Moved once, not by each of the states.
            state = state.reorder(rows.to(source.device), left.to(source.device) if gone else None)
    return results


def _candidates(log_p: Tensor, scores: Tensor, last: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 2 k best continuations of each sentence, on the CPU: their log p, beams and words, (b, 2 k) each."""
    b, k = scores.shape
    log_p = log_p.unflatten(0, (b, k)).clone()
    V = log_p.shape[-1]
    log_p[..., PAD] = log_p[..., BOS] = -torch.inf
    if any(last):
        ended = torch.tensor(last, device=log_p.device)[:, None, None]
        log_p = log_p.masked_fill(ended & (torch.arange(V, device=log_p.device) != EOS), -torch.inf)
    # The best of all beams are among the best of each.
    kept, word = (x.cpu() for x in log_p.topk(min(2 * k, V), 2))
    total = scores.unsqueeze(-1) + kept.double()
    top, index = total.flatten(1).sort(dim=1, descending=True, stable=True)
    top, index = top[:, : 2 * k], index[:, : 2 * k]
    if not bool(torch.isfinite(top[:, 0]).all()):
        raise ValueError("the model gives no finite probability to any next token; its weights are broken")
    return top, index // kept.shape[-1], word.flatten(1).gather(1, index)


def _collect(
    sentences: Sequence[_Sentence],
    search: Search,
    length: int,
    top: Tensor,
    parent: Tensor,
    word: Tensor,
    history: Tensor,
) -> None:
    """Give each sentence the hypotheses that end among the k best of this step."""
    ends = (word == EOS) & top.isfinite()
    ends[:, search.beam :] = False
    for i, j in ends.nonzero().tolist():
        log_prob = float(top[i, j])
        tokens = history[i, int(parent[i, j])].tolist()
        sentences[i].finished.append(Hypothesis(tokens, log_prob, search.score(log_prob, length)))
