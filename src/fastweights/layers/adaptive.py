"""`AdaptiveSoftmax`: a softmax over very many words at the price of the frequent ones [Grave et al. 2017].

Words are numbered by falling frequency and cut into a head and clusters of rarer words. The head's softmax runs over
its words and one entry per cluster; a rare word has the probability of its cluster times that within the cluster. All
words keep their full size ("div_val 1" in the authors' code), so that one matrix (V, d_model) serves as input embedding
too [Baevski & Auli 2019].
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fastweights.common.transforms import is_transformed
from fastweights.layers.checks import check_dtype
from fastweights.layers.fusing import check_backend, in_autocast_dtype, takes_kernels
from fastweights.ops.gpu.adaptive_softmax.operators import fused_nll
from fastweights.ops.gpu.adaptive_softmax.self_check import refuses
from fastweights.ops.losses.adaptive_softmax import TILE_BYTES, logits_of, plain_nll
from fastweights.ops.losses.kept_softmax import kept_nll


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
            so memory does not grow with N x V. On the CPU, float32 and float64 keep as many bytes of probabilities for
            the backward pass instead.
        backend: "fused", the GPU kernels, which make no logits in memory and never wait for the device; "dense", plain
            PyTorch; "auto" takes the kernels where they can run. They give NaN for a target that is no word.

    Under `torch.func`, `vmap` or forward-mode derivatives plain PyTorch computes the losses without tiles; a target
    that is no word gives NaN there, too.
    """

    cluster_weight: nn.Parameter | None
    cluster_bias: nn.Parameter | None

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        cutoffs: Sequence[int] = (),
        *,
        tile_bytes: int = TILE_BYTES,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.vocab_size, self.d_model, self.cutoffs = vocab_size, d_model, check_cutoffs(cutoffs, vocab_size)
        if tile_bytes < 1:
            raise ValueError(f"tile_bytes must be at least 1, got {tile_bytes}")
        self.tile_bytes, self.backend = tile_bytes, check_backend(backend)
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size))
        clusters = len(self.cutoffs)
        self.cluster_weight = nn.Parameter(torch.empty(clusters, d_model)) if clusters else None
        self.cluster_bias = nn.Parameter(torch.empty(clusters)) if clusters else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw weights from N(0, std²) and set biases to 0, as in the authors' code."""
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)
        if self.cluster_weight is not None and self.cluster_bias is not None:
            nn.init.normal_(self.cluster_weight, std=std)
            nn.init.zeros_(self.cluster_bias)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Compute -log p(target) for hidden (..., d_model) and targets (...), in their order: at least float32."""
        self._check(hidden)
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"targets must have shape {tuple(hidden.shape[:-1])} to go with hidden {tuple(hidden.shape)}, "
                f"got {tuple(targets.shape)}"
            )
        if targets.dtype != torch.int64:
            raise TypeError(f"targets must be int64 word numbers, got {targets.dtype}")
        flat = in_autocast_dtype(hidden.reshape(-1, self.d_model))
        inputs = (flat, [self.weight, self.bias, *self._clusters()], targets.reshape(-1), list(self.cutoffs))
        if takes_kernels(self, flat, lambda: refuses(flat, self.weight)):
            nll = fused_nll(*inputs)
        elif is_transformed():
            nll = plain_nll(*inputs)
        else:
            nll = kept_nll(*inputs, self.tile_bytes)
        return nll.view(targets.shape)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Compute log p of every word: (..., d_model) -> (..., vocab_size), at least float32. For few tokens."""
        self._check(hidden)
        head, hidden = self._head(hidden), in_autocast_dtype(hidden)
        parts = [head[..., : self._bounds[1]]]
        for c, words in enumerate(self._tails):
            parts.append(head[..., self._bounds[1] + c, None] + self._tail(hidden, words))
        return torch.cat(parts, -1)

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """Return the most likely word: (..., d_model) -> (...). Clusters are searched where the head prefers one."""
        self._check(hidden)
        flat = hidden.reshape(-1, self.d_model)
        # A word of the head that beats every cluster beats all their words.
        words = self._head(flat).argmax(-1)
        open_rows = (words >= self._bounds[1]).nonzero().squeeze(1)
        # Of nothing, `split` makes one part without rows.
        parts = open_rows.split(max(1, self.tile_bytes // (4 * self.vocab_size))) if len(open_rows) else ()
        for rows in parts:
            words[rows] = self.log_prob(flat[rows]).argmax(-1)
        return words.view(hidden.shape[:-1])

    @torch.no_grad()
    def sample(self, hidden: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a word from p: (..., d_model) -> (...). First in the head, then in the cluster that came out."""
        self._check(hidden)
        flat = hidden.reshape(-1, self.d_model)
        words = torch.multinomial(self._head(flat).exp(), 1, generator=generator).squeeze(1)
        cluster = words - self._bounds[1]
        for c, span in enumerate(self._tails):
            rows = (cluster == c).nonzero().squeeze(1)
            if len(rows):
                p = self._tail(in_autocast_dtype(flat[rows]), span).exp()
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
        """Compute log_softmax over the head's words, then the clusters."""
        size, (cluster_weight, cluster_bias) = self._bounds[1], self._clusters()
        weight, bias = torch.cat([self.weight[:size], cluster_weight]), torch.cat([self.bias[:size], cluster_bias])
        return self._log_softmax(in_autocast_dtype(hidden), weight, bias)

    def _tail(self, hidden: Tensor, words: slice) -> Tensor:
        return self._log_softmax(hidden, self.weight[words], self.bias[words])

    def _log_softmax(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return logits_of(hidden, weight.to(hidden.dtype), bias).log_softmax(-1)

    def _check(self, hidden: Tensor) -> None:
        if hidden.dim() < 1 or hidden.shape[-1] != self.d_model or 0 in hidden.shape:
            raise ValueError(f"hidden must have shape (..., d_model = {self.d_model}), got {tuple(hidden.shape)}")
        if not hidden.is_floating_point():
            check_dtype(hidden, self, "hidden")

    def extra_repr(self) -> str:
        """Return what print(layer) shows."""
        return f"vocab_size={self.vocab_size}, d_model={self.d_model}, cutoffs={self.cutoffs}"


def check_cutoffs(cutoffs: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return `cutoffs` as a tuple if they rise from above 0 to below vocab_size."""
    if any(low >= high for low, high in pairwise((0, *cutoffs, vocab_size))):
        raise ValueError(f"cutoffs must rise and lie between 0 and vocab_size = {vocab_size}, got {tuple(cutoffs)}")
    return tuple(cutoffs)
