"""The adaptive softmax in plain PyTorch, in tiles of tokens: any device, any dtype.

N tokens, V words, C clusters, K entries of one softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Logits that may exist at once, in bytes; enough rows for the matrix products, little beside weights and activations.
TILE_BYTES = 2**26


def dense_nll(hidden: Tensor, weight: Tensor, bias: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(hidden W^T + b)[index] and the log-sum-exp, (N,) each, for hidden (N, d) and weight (K, d).

    This and `dense_gradient` are all the arithmetic there is, and what the fused kernels replace.
    """
    logits = logits_of(hidden, weight, bias)
    chosen = logits.gather(1, index.unsqueeze(1)).squeeze(1)
    top = logits.amax(1)
    total = logits.sub_(top.unsqueeze(1)).exp_().sum(1).log_().add_(top)
    return total - chosen, total


def dense_gradient(hidden: Tensor, weight: Tensor, bias: Tensor, index: Tensor, total: Tensor, grad: Tensor) -> Tensor:
    """Gradient (N, K) of the logits under `grad` (N,) of the nll: grad (softmax - one_hot(index))."""
    probabilities = logits_of(hidden, weight, bias).sub_(total.unsqueeze(1)).exp_().mul_(grad.unsqueeze(1))
    probabilities[torch.arange(len(index), device=index.device), index] -= grad
    return probabilities


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
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
