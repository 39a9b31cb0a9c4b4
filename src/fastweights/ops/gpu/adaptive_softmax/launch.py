"""Launches the softmax kernels: forward, which also finds the gradient by the hidden vectors, and backward.

That gradient costs one product in the forward pass and saves making the logits once more; the backward pass makes them
again for the weights alone. Nothing waits for the device, and no shape depends on the data. Triton is imported when the
kernels first run. N tokens of size d, V words, C clusters, S = C + 1 softmaxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops.gpu.adaptive_softmax.variants import PRECISION, Config
from fastweights.ops.gpu.device import use_device_of


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass; sorted is by the tokens' targets."""

    slope: Tensor  # (N, d) gradient of each loss by its hidden vector, as the caller orders them; (0, d) if not wanted
    totals: Tensor  # (2, N) log-sum-exps of head and cluster in base 2, sorted
    hidden: Tensor  # (N, d) sorted
    weight: Tensor  # (V + C, d) rows of all softmaxes: the head's words, the clusters, the other words
    bias: Tensor  # (V + C,)
    order: Tensor  # (N,) which token comes to stand where
    entries: Tensor  # (2, N) the targets' rows in the head and in their cluster, sorted
    starts: Tensor  # (S,) first token of each cluster, and the first that has no word


@cache
def _kernels() -> ModuleType:
    from fastweights.ops.gpu.adaptive_softmax import kernels

    return kernels


@cache
def _bounds(cutoffs: tuple[int, ...], words: int, device: str) -> tuple[Tensor, Tensor]:
    """Return where clusters begin and the words end (S,), and where the rows of each softmax do (S + 1,).

    Kept, because a copy from the host can be no part of a CUDA graph.
    """
    ends = (*cutoffs, words)
    rows = (0, *(end + len(cutoffs) for end in ends))
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, rows))  # type: ignore[return-value]


def _sizes(cutoffs: Sequence[int], words: int) -> list[int]:
    """Return the number of rows of each softmax; the head has those of the clusters too."""
    sizes = [high - low for low, high in pairwise((0, *cutoffs, words))]
    return [sizes[0] + len(cutoffs), *sizes[1:]]


def _slots(tokens: int, cutoffs: Sequence[int], words: int, config: Config) -> int:
    """Return how many parts all softmaxes may have, wherever the targets fall."""
    tiles = -(-tokens // config.tile)
    sizes = _sizes(cutoffs, words)
    return sum(min(max(config.parts, tiles), -(-size // config.least) * tiles) for size in sizes)


def _packed(words: Tensor, clusters: Tensor, cutoffs: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the rows in the order of the kernels, cast on the way: the head's words, the clusters, the other words."""
    rows = words.new_empty((len(words) + len(clusters), *words.shape[1:]), dtype=dtype)
    size = cutoffs[0] if cutoffs else len(words)
    rows[:size].copy_(words[:size])
    if cutoffs:
        rows[size : size + len(clusters)].copy_(clusters)
        rows[size + len(clusters) :].copy_(words[size:])
    return rows


def _options(hidden: Tensor, cutoffs: Sequence[int], **split: int) -> Any:
    """Return what kernels are compiled for, to which `split` adds how they split the work."""
    import triton.language as tl

    d, acc = hidden.shape[1], tl.float64 if hidden.dtype == torch.float64 else tl.float32
    sizes = {"S": len(cutoffs) + 1, "D": d, "block_D": max(16, 1 << (d - 1).bit_length())}
    return _kernels().Options(**sizes, acc=acc, precision=PRECISION[hidden.dtype], **split)


def forward(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    targets: Tensor,
    cutoffs: Sequence[int],
    keep: bool,
    config: Config,
) -> tuple[Tensor, Kept]:
    """Compute -log p(target) (N,), NaN where there is no such word, and what its gradient needs if that is wanted."""
    kernels, hidden = _kernels(), hidden.contiguous()
    weight, bias, cluster_weight, cluster_bias = parameters
    (N, d), V = hidden.shape, len(weight)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    ends, rows = _bounds(tuple(cutoffs), V, str(hidden.device))
    # No number of 64 bits may come back as a word.
    words, order = targets.clamp(-1, V).to(torch.int32).sort(stable=True)
    nll = hidden.new_empty(N, dtype=wide)
    kept = Kept(
        slope=hidden.new_empty(N if keep else 0, d),
        totals=hidden.new_zeros(2, N, dtype=wide),
        hidden=torch.empty_like(hidden),
        weight=_packed(weight, cluster_weight, cutoffs, hidden.dtype),
        bias=_packed(bias, cluster_bias, cutoffs, wide),
        order=order,
        entries=words.new_empty(2, N),
        starts=torch.searchsorted(words, ends, out_int32=True),
    )
    slots = _slots(N, cutoffs, V, config)
    partial_totals = hidden.new_empty(slots, config.tile, dtype=wide)
    partial_means = hidden.new_empty(slots if keep else 0, config.tile, d)
    split = {"tile": config.tile, "step": config.step, "parts": config.parts, "least": config.least}
    options = _options(hidden, cutoffs, **split, keep=keep)
    with use_device_of(hidden):
        kernels.sort_tokens[(-(-N // 16),)](
            *(hidden, order, words, ends, kept.hidden, kept.entries, N), _options(hidden, cutoffs, tile=16), num_warps=4
        )
        kernels.partial_softmax[(slots,)](
            *(kept.hidden, kept.weight, kept.bias, kept.starts, rows, partial_totals, partial_means, N, options),
            num_warps=config.warps,
            num_stages=config.stages,
        )
        kernels.join_parts[(N,)](
            *(kept.hidden, kept.weight, kept.bias, order, words, kept.entries, kept.starts, rows),
            *(partial_totals, partial_means, nll, kept.slope, kept.totals, N, V, options),
            num_warps=1,
        )
    return nll, kept


def backward(
    grad: Tensor, kept: Kept, cutoffs: Sequence[int], dtype: torch.dtype, config: Config
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the parameters in `dtype`: every program has rows of its own and visits their tokens."""
    x, C = kept.hidden, len(cutoffs)
    d, V = x.shape[1], len(kept.weight) - C
    head, *clusters = _sizes(cutoffs, V)
    _, rows = _bounds(tuple(cutoffs), V, str(x.device))
    d_weight, d_bias = x.new_empty(V, d, dtype=dtype), x.new_empty(V, dtype=dtype)
    tiles = -(-head // config.back_tile)
    parts = max(1, min(config.parts // tiles, -(-len(x) // config.back_step)))
    wide = torch.promote_types(x.dtype, torch.float32)
    head_weight, head_bias = x.new_empty(parts, head, d, dtype=wide), x.new_empty(parts, head, dtype=wide)
    options = _options(x, cutoffs, tile=config.back_tile, step=config.back_step, parts=parts)
    with use_device_of(x):
        _kernels().weight_gradient[(parts * tiles + sum(-(-size // config.back_tile) for size in clusters),)](
            *(x, kept.weight, kept.bias, kept.entries, kept.starts, rows, kept.totals),
            *(grad.index_select(0, kept.order), head_weight, head_bias, d_weight, d_bias, len(x), options),
            num_warps=config.back_warps,
            num_stages=config.back_stages,
        )
    head_weight, head_bias, words = head_weight.sum(0), head_bias.sum(0), head - C
    d_weight[:words].copy_(head_weight[:words])
    d_bias[:words].copy_(head_bias[:words])
    return d_weight, d_bias, head_weight[words:].to(dtype, copy=True), head_bias[words:].to(dtype, copy=True)
