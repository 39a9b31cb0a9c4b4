"""Drawing the next word, and text word by word.

for token in generate(Stream(model), prompt, 50, Sampling(temperature=0.8, top_p=0.9), seed=1):
    ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.inference.stream import Reader


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which words may come next, and how surely the likely ones do.

    Attributes:
        temperature: log-probabilities are divided by it; 0 always takes the most likely word.
        top_k: only the k most likely words; None for all.
        top_p: of those only the fewest likely ones whose probabilities, at this temperature, reach p; None for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 word, got {self.top_k}; leave it out for all words")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def probabilities(self, log_probs: Tensor) -> Tensor:
        """Return the probabilities (..., V) to draw from, given log p (..., V): 0 for words that may not come."""
        if self.temperature == 0:
            # argmax takes the first of equals, so that the result is one word and always the same.
            return torch.zeros_like(log_probs).scatter_(-1, log_probs.argmax(-1, keepdim=True), 1.0)
        scaled = (log_probs.double() / self.temperature).log_softmax(-1)
        ordered, words = scaled.sort(dim=-1, descending=True, stable=True)
        p = ordered.exp()
        if self.top_k is not None:
            p[..., self.top_k :] = 0
            p = p / p.sum(-1, keepdim=True)
        if self.top_p is not None:
            # A word stays when those before it do not reach p; the first always does.
            p = p.where(p.cumsum(-1) - p < self.top_p, 0)
            p = p / p.sum(-1, keepdim=True)
        return torch.zeros_like(p).scatter_(-1, words, p)

    def draw(self, log_probs: Tensor, generator: torch.Generator) -> int:
        """Draw a word from log p (V,)."""
        if not torch.isfinite(log_probs.max()):
            raise ValueError("the model gives no finite probability to any word; its weights are broken")
        # On the CPU, so that a seed gives the same words on every device that gives the same probabilities.
        p = self.probabilities(log_probs.cpu())
        return int(torch.multinomial(p, 1, generator=generator))


def generate(
    reader: Reader, prompt: Sequence[int], count: int, sampling: Sampling | None = None, seed: int = 0
) -> Iterator[int]:
    """Feed the prompt, then give `count` words, each as soon as it is drawn and before it is fed."""
    if count < 0:
        raise ValueError(f"count must be at least 0 words, got {count}")
    sampling, generator = sampling or Sampling(), torch.Generator().manual_seed(seed)
    log_probs = reader.feed(prompt)
    for number in range(count):
        token = sampling.draw(log_probs, generator)
        yield token
        if number < count - 1:
            log_probs = reader.feed([token])
