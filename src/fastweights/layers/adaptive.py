"""`AdaptiveSoftmax`: a softmax over very many words at the price of the frequent ones [Grave et al. 2017].

Words are numbered by falling frequency and cut into a head and clusters of rarer words. The head's softmax runs over
its words and one entry per cluster; a rare word has the probability of its cluster times that within the cluster. All
words keep their full size ("div_val 1" in the authors' code), so that one matrix (V, d_model) serves as input embedding
too [Baevski & Auli 2019].

N tokens, V words, C clusters, K entries of one softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Logits that may exist at once, in bytes; enough rows for the matrix products, little beside weights and activations.
TILE_BYTES = 2**26


def dense_nll(hidden: Tensor, weight: Tensor, bias: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(hidden W^T + b)[index] and the log-sum-exp, (N,) each, for hidden (N, d) and weight (K, d).

    This and `dense_gradient` are all the arithmetic there is, and what a fused kernel has to replace.
    """
    logits = _logits(hidden, weight, bias)
    chosen = logits.gather(1, index.unsqueeze(1)).squeeze(1)
    top = logits.amax(1)
    total = logits.sub_(top.unsqueeze(1)).exp_().sum(1).log_().add_(top)
    return total - chosen, total


def dense_gradient(hidden: Tensor, weight: Tensor, bias: Tensor, index: Tensor, total: Tensor, grad: Tensor) -> Tensor:
    """Gradient (N, K) of the logits under `grad` (N,) of the nll: grad (softmax - one_hot(index))."""
    probabilities = _logits(hidden, weight, bias).sub_(total.unsqueeze(1)).exp_().mul_(grad.unsqueeze(1))
    probabilities[torch.arange(len(index), device=index.device), index] -= grad
    return probabilities


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """hidden W^T + b, at least float32 once the product is made."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden @ weight.mT).to(wide).add_(bias.to(wide))


class Part(NamedTuple):
    """One softmax over some of the tokens: the head over all, or a cluster over those whose target it holds."""

    level: int  # 0 for the head, 1 for clusters
    rows: Tensor  # (n,) which tokens
    entries: Tensor  # (n,) their targets among the K
    weight: Tensor  # (K, d)
    bias: Tensor  # (K,)
    words: slice  # the V that these entries are, less the head's C

    def tiles(self, tile_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and entries of so many tokens that their logits fit."""
        size = torch.promote_types(self.weight.dtype, torch.float32).itemsize
        count = max(1, tile_bytes // (size * len(self.weight)))
        return zip(self.rows.split(count), self.entries.split(count), strict=True)


def _parts(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    cluster_weight: Tensor,
    cluster_bias: Tensor,
    targets: Tensor,
    cutoffs: Sequence[int],
) -> Iterator[Part]:
    """The softmaxes that give each target its probability, with weights in the dtype of `hidden`."""
    bounds = [0, *cutoffs, len(weight)]
    # 0: below every word, 1: in the head, 2 and on: in the clusters, last: above every word. One transfer for all.
    place = torch.bucketize(targets, torch.tensor(bounds, device=targets.device), right=True)
    counts = torch.stack([(place == i).sum() for i in range(len(bounds) + 1)]).tolist()
    if counts[0] or counts[-1]:
        found = f"{targets.min().item()} to {targets.max().item()}"
        raise ValueError(f"targets must be words from 0 to vocab_size - 1 = {len(weight) - 1}, got {found}")
    size = bounds[1]
    index = torch.where(place == 1, targets, place + (size - 2))
    joint = (torch.cat([weight[:size], cluster_weight]), torch.cat([bias[:size], cluster_bias]))
    rows = torch.arange(len(targets), device=targets.device)
    yield Part(0, rows, index, joint[0].to(hidden.dtype), joint[1], slice(0, size))
    groups = place.argsort(stable=True).split(counts)[2:-1]
    for (low, high), rows in zip(pairwise(bounds[1:]), groups, strict=True):
        if len(rows):
            words = slice(low, high)
            yield Part(1, rows, targets[rows] - low, weight[words].to(hidden.dtype), bias[words], words)


# How many tokens fall into each cluster is known only at run time, on the CPU: no CUDA graph can hold this.
@torch.library.custom_op("fastweights::adaptive_nll", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def adaptive_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    cluster_weight: Tensor,
    cluster_bias: Tensor,
    targets: Tensor,
    cutoffs: list[int],
    tile_bytes: int,
) -> tuple[Tensor, Tensor]:
    """-log p(target) (N,), at least float32, and the log-sum-exps (2, N) of head and cluster for the backward pass."""
    with torch.autocast(hidden.device.type, enabled=False):
        nll = hidden.new_zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        totals = nll.new_zeros(2, len(hidden))
        for part in _parts(hidden, weight, bias, cluster_weight, cluster_bias, targets, cutoffs):
            for rows, index in part.tiles(tile_bytes):
                losses, totals[part.level, rows] = dense_nll(hidden[rows], part.weight, part.bias, index)
                nll[rows] += losses
        return nll, totals


@torch.library.custom_op("fastweights::adaptive_nll_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def adaptive_nll_backward(
    grad: Tensor,
    totals: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    cluster_weight: Tensor,
    cluster_bias: Tensor,
    targets: Tensor,
    cutoffs: list[int],
    tile_bytes: int,
) -> list[Tensor]:
    """Gradients of hidden and the four parameters: each tile's logits are made again, used and dropped."""
    inputs = (hidden, weight, bias, cluster_weight, cluster_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        grads = [x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        d_hidden, d_weight, d_bias, d_cluster_weight, d_cluster_bias = grads
        for part in _parts(*inputs, targets, cutoffs):
            words = part.words.stop - part.words.start
            for rows, index in part.tiles(tile_bytes):
                h = hidden[rows]
                d = dense_gradient(h, part.weight, part.bias, index, totals[part.level, rows], grad[rows])
                d_bias[part.words] += d[:, :words].sum(0)
                d_cluster_bias += d[:, words:].sum(0) if part.level == 0 else 0
                d = d.to(h.dtype)
                d_hidden[rows] += d @ part.weight
                _add_product(d_weight[part.words], d[:, :words].mT, h)
                if part.level == 0:
                    _add_product(d_cluster_weight, d[:, words:].mT, h)
        return [d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a temporary the size of `total` where the dtypes allow."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


@adaptive_nll.register_fake
def _(hidden, weight, bias, cluster_weight, cluster_bias, targets, cutoffs, tile_bytes):  # type: ignore[no-untyped-def]
    nll = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    return nll, nll.new_empty(2, hidden.shape[0])


@adaptive_nll_backward.register_fake
def _(grad, totals, hidden, weight, bias, cluster_weight, cluster_bias, targets, cutoffs, tile_bytes):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x in (hidden, weight, bias, cluster_weight, cluster_bias)]


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.cutoffs, ctx.tile_bytes = inputs
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    grads = adaptive_nll_backward(grad, *ctx.saved_tensors, ctx.cutoffs, ctx.tile_bytes)
    return *grads, None, None, None


adaptive_nll.register_autograd(_backward, setup_context=_setup_context)


class AdaptiveSoftmax(nn.Module):
    """Losses, probabilities and samples of the next word; without cut-offs a plain softmax.

    Equivalent to, for a word w of cluster c = [low, high) and h of size d_model,

        head = log_softmax(cat([weight[:cutoffs[0]], cluster_weight]) @ h + cat([bias[:cutoffs[0]], cluster_bias]))
        tail = log_softmax(weight[low:high] @ h + bias[low:high])
        log_p = head[w] if w < cutoffs[0] else head[cutoffs[0] + c] + tail[w - low]

    Args:
        vocab_size: number of words V, the frequent ones first.
        d_model: size of the hidden vectors.
        cutoffs: where the clusters begin, rising; the paper's models have (20000, 40000, 200000) for 267,735 words.
        tile_bytes: room for logits. Tokens are taken in tiles whose logits fit, and the backward pass makes them again,
            so memory does not grow with N x V; results do not depend on it.
    """

    cluster_weight: nn.Parameter | None
    cluster_bias: nn.Parameter | None

    def __init__(
        self, vocab_size: int, d_model: int, cutoffs: Sequence[int] = (), *, tile_bytes: int = TILE_BYTES
    ) -> None:
        super().__init__()
        self.vocab_size, self.d_model, self.cutoffs = vocab_size, d_model, check_cutoffs(cutoffs, vocab_size)
        if tile_bytes < 1:
            raise ValueError(f"tile_bytes must be at least 1, got {tile_bytes}")
        self.tile_bytes = tile_bytes
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size))
        clusters = len(self.cutoffs)
        self.cluster_weight = nn.Parameter(torch.empty(clusters, d_model)) if clusters else None
        self.cluster_bias = nn.Parameter(torch.empty(clusters)) if clusters else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Weights from N(0, std²), biases 0, as in the authors' code."""
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)
        if self.cluster_weight is not None and self.cluster_bias is not None:
            nn.init.normal_(self.cluster_weight, std=std)
            nn.init.zeros_(self.cluster_bias)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) for hidden (..., d_model) and targets (...), in their order: at least float32."""
        self._check(hidden)
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"targets must have shape {tuple(hidden.shape[:-1])} to go with hidden {tuple(hidden.shape)}, "
                f"got {tuple(targets.shape)}"
            )
        if targets.dtype != torch.int64:
            raise TypeError(f"targets must be int64 word numbers, got {targets.dtype}")
        flat = self._cast(hidden.reshape(-1, self.d_model))
        nll, _ = adaptive_nll(
            flat, self.weight, self.bias, *self._clusters(), targets.reshape(-1), list(self.cutoffs), self.tile_bytes
        )
        return nll.view(targets.shape)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """log p of every word: (..., d_model) -> (..., vocab_size), at least float32. For few tokens at a time."""
        self._check(hidden)
        head, hidden = self._head(hidden), self._cast(hidden)
        parts = [head[..., : self._bounds[1]]]
        for c, words in enumerate(self._tails):
            parts.append(head[..., self._bounds[1] + c, None] + self._tail(hidden, words))
        return torch.cat(parts, -1)

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The most likely word: (..., d_model) -> (...). Clusters are looked into only where the head prefers one."""
        self._check(hidden)
        flat = hidden.reshape(-1, self.d_model)
        # A word of the head that beats every cluster beats all their words.
        words = self._head(flat).argmax(-1)
        open_rows = (words >= self._bounds[1]).nonzero().squeeze(1)
        for rows in open_rows.split(max(1, self.tile_bytes // (4 * self.vocab_size))):
            words[rows] = self.log_prob(flat[rows]).argmax(-1)
        return words.view(hidden.shape[:-1])

    @torch.no_grad()
    def sample(self, hidden: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A word drawn from p: (..., d_model) -> (...). First in the head, then in the cluster that came out."""
        self._check(hidden)
        flat = hidden.reshape(-1, self.d_model)
        words = torch.multinomial(self._head(flat).exp(), 1, generator=generator).squeeze(1)
        cluster = words - self._bounds[1]
        for c, span in enumerate(self._tails):
            rows = (cluster == c).nonzero().squeeze(1)
            if len(rows):
                p = self._tail(self._cast(flat[rows]), span).exp()
                words[rows] = span.start + torch.multinomial(p, 1, generator=generator).squeeze(1)
        return words.view(hidden.shape[:-1])

    @property
    def _bounds(self) -> tuple[int, ...]:
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def _tails(self) -> list[slice]:
        return [slice(low, high) for low, high in pairwise(self._bounds[1:])]

    def _clusters(self) -> tuple[Tensor, Tensor]:
        if self.cluster_weight is None or self.cluster_bias is None:
            return self.weight.new_zeros(0, self.d_model), self.bias.new_zeros(0)
        return self.cluster_weight, self.cluster_bias

    def _head(self, hidden: Tensor) -> Tensor:
        """log_softmax over the head's words, then the clusters."""
        size, (cluster_weight, cluster_bias) = self._bounds[1], self._clusters()
        weight, bias = torch.cat([self.weight[:size], cluster_weight]), torch.cat([self.bias[:size], cluster_bias])
        return self._log_softmax(self._cast(hidden), weight, bias)

    def _tail(self, hidden: Tensor, words: slice) -> Tensor:
        return self._log_softmax(hidden, self.weight[words], self.bias[words])

    def _log_softmax(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return _logits(hidden, weight.to(hidden.dtype), bias).log_softmax(-1)

    def _cast(self, hidden: Tensor) -> Tensor:
        """In the dtype of autocast, as the input of any matrix product."""
        device = hidden.device.type
        narrow = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        return hidden.to(torch.get_autocast_dtype(device)) if narrow else hidden

    def _check(self, hidden: Tensor) -> None:
        if hidden.dim() < 1 or hidden.shape[-1] != self.d_model or 0 in hidden.shape:
            raise ValueError(f"hidden must have shape (..., d_model = {self.d_model}), got {tuple(hidden.shape)}")

    def extra_repr(self) -> str:
        """Shown by print(layer)."""
        return f"vocab_size={self.vocab_size}, d_model={self.d_model}, cutoffs={self.cutoffs}"


def check_cutoffs(cutoffs: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """`cutoffs` as a tuple, found to rise from above 0 to below vocab_size."""
    if any(low >= high for low, high in pairwise((0, *cutoffs, vocab_size))):
        raise ValueError(f"cutoffs must rise and lie between 0 and vocab_size = {vocab_size}, got {tuple(cutoffs)}")
    return tuple(cutoffs)
