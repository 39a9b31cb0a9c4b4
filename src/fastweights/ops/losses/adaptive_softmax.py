"""The adaptive softmax in plain PyTorch: any device, any dtype.

N tokens, V words, C clusters, K entries of one softmax. Words below cutoffs[0] are the head's, the others are in
clusters that begin at the cutoffs; the head's softmax has its words, then one entry per cluster. Its `parameters` are
the words' weight (V, d) and bias (V,), and those of the clusters, (C, d) and (C,).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.common.transforms import refuse_tangent
from fastweights.ops.cpu.matrix_vector import matrix_vector, takes

# Logits that may exist at once, in bytes; enough rows for the matrix products, little beside weights and activations.
TILE_BYTES = 2**26


def plain_nll(hidden: Tensor, parameters: Sequence[Tensor], targets: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Compute -log p(target) (N,), at least float32; NaN where there is no such word.

    No shape depends on the targets and nothing is changed in place, so every transform of `torch.func` and forward mode
    go through it. The logits of all words exist at once.
    """
    weight, bias, cluster_weight, cluster_bias = parameters
    head, *clusters = pairwise((0, *cutoffs, len(weight)))
    cluster = torch.zeros_like(targets)
    for low, _ in clusters:
        cluster = cluster + (targets >= low)
    rows = torch.cat([weight[: head[1]], cluster_weight]), torch.cat([bias[: head[1]], cluster_bias])
    entry = torch.where(cluster == 0, targets, head[1] - 1 + cluster)
    nll = _chosen_nll(hidden, *rows, entry)
    for c, (low, high) in enumerate(clusters, 1):
        inside = _chosen_nll(hidden, weight[low:high], bias[low:high], targets - low)
        nll = nll + torch.where(cluster == c, inside, 0)
    return torch.where((targets >= 0) & (targets < len(weight)), nll, torch.nan)


def _chosen_nll(hidden: Tensor, weight: Tensor, bias: Tensor, entry: Tensor) -> Tensor:
    """Compute -log softmax(hidden W^T + b)[entry]; anything for an entry that does not exist."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = (hidden @ weight.to(hidden.dtype).mT).to(wide) + bias.to(wide)
    return -logits.log_softmax(-1).gather(1, entry.clamp(0, len(weight) - 1).unsqueeze(1)).squeeze(1)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute hidden W^T + b, at least float32 once the product is made."""
    if takes(hidden, weight, bias):
        return matrix_vector(hidden, weight, bias)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden @ weight.mT).to(wide).add_(bias.to(wide))


def tile_nll(hidden: Tensor, weight: Tensor, bias: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """Compute -log softmax(hidden W^T + b)[entry] and the log-sum-exp, (N,) each, for hidden (N, d) and weight (K, d).

    This and `tile_gradient` are all the arithmetic there is, and what the fused kernels replace.
    """
    logits = logits_of(hidden, weight, bias)
    chosen = logits.gather(1, entry.unsqueeze(1)).squeeze(1)
    top = logits.amax(1)
    total = logits.sub_(top.unsqueeze(1)).exp_().sum(1).log_().add_(top)
    return total - chosen, total


def tile_gradient(hidden: Tensor, weight: Tensor, bias: Tensor, entry: Tensor, total: Tensor, grad: Tensor) -> Tensor:
    """Compute the gradient (N, K) of the logits under `grad` (N,) of the nll: grad (softmax - one_hot(entry))."""
    probabilities = logits_of(hidden, weight, bias).sub_(total.unsqueeze(1)).exp_().mul_(grad.unsqueeze(1))
    probabilities[torch.arange(len(entry), device=entry.device), entry] -= grad
    return probabilities


class Part(NamedTuple):
    """One softmax over some of the tokens: the head over all, or a cluster over those whose target it holds."""

    level: int  # 0 for the head, 1 for clusters
    rows: Tensor | None  # (n,) which tokens; None for all
    entries: Tensor  # (n,) their targets among the K
    weight: Tensor  # (K, d)
    bias: Tensor  # (K,)
    words: slice  # the V that these entries are, less the head's C

    def tiles(self, tile_bytes: int) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Yield rows and entries, of as many tokens at a time as have logits that fit."""
        size = torch.promote_types(self.weight.dtype, torch.float32).itemsize
        count = max(1, tile_bytes // (size * len(self.weight)))
        for start in range(0, len(self.entries), count):
            span = slice(start, start + count)
            yield span if self.rows is None else self.rows[span], self.entries[span]


def parts_of(
    parameters: Sequence[Tensor], targets: Tensor, cutoffs: Sequence[int], dtype: torch.dtype
) -> Iterator[Part]:
    """Yield the softmaxes that give each target its probability, with weights in `dtype`."""
    weight, bias, cluster_weight, cluster_bias = parameters
    bounds = [0, *cutoffs, len(weight)]
    # 0: below every word, 1: in the head, 2 and on: in the clusters, last: above every word. One transfer for all.
    place = torch.bucketize(targets, torch.tensor(bounds, device=targets.device), right=True)
    counts = torch.stack([(place == i).sum() for i in range(len(bounds) + 1)]).tolist()
    if counts[0] or counts[-1]:
        span = f"{targets.min().item()} to {targets.max().item()}"
        raise ValueError(f"targets must be words from 0 to vocab_size - 1 = {len(weight) - 1}, got {span}")
    size = bounds[1]
    entries = torch.where(place == 1, targets, place + (size - 2))
    joint = (weight, bias)
    if cutoffs:
        joint = (torch.cat([weight[:size], cluster_weight]), torch.cat([bias[:size], cluster_bias]))
    yield Part(0, None, entries, joint[0].to(dtype), joint[1], slice(0, size))
    groups = place.argsort(stable=True).split(counts)[2:-1]
    for (low, high), rows in zip(pairwise(bounds[1:]), groups, strict=True):
        if len(rows):
            words = slice(low, high)
            yield Part(1, rows, targets[rows] - low, weight[words].to(dtype), bias[words], words)


# How many tokens fall into each cluster is known only at run time, on the CPU: no CUDA graph can hold this.
@torch.library.custom_op("fastweights::adaptive_nll", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tiled_nll(
    hidden: Tensor, parameters: Sequence[Tensor], targets: Tensor, cutoffs: Sequence[int], tile_bytes: int
) -> tuple[Tensor, Tensor]:
    """Compute `plain_nll` (N,) in tiles of tokens, and the log-sum-exps (2, N) of head and cluster for the gradient."""
    with torch.autocast(hidden.device.type, enabled=False):
        nll = hidden.new_zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        totals = nll.new_zeros(2, len(hidden))
        for part in parts_of(parameters, targets, cutoffs, hidden.dtype):
            for rows, entries in part.tiles(tile_bytes):
                losses, totals[part.level, rows] = tile_nll(hidden[rows], part.weight, part.bias, entries)
                nll[rows] += losses
        return nll, totals


# No list of tensors here: `vmap` over gradients takes such operators apart only if they have none.
@torch.library.custom_op("fastweights::adaptive_nll_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tiled_nll_backward(
    grad: Tensor,
    totals: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    cluster_weight: Tensor,
    cluster_bias: Tensor,
    targets: Tensor,
    cutoffs: Sequence[int],
    tile_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of hidden and the four parameters: each tile's logits are made again, used and dropped."""
    inputs = (hidden, weight, bias, cluster_weight, cluster_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        grads = [x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        d_hidden, d_weight, d_bias, d_cluster_weight, d_cluster_bias = grads
        for part in parts_of(inputs[1:], targets, cutoffs, hidden.dtype):
            words = part.words.stop - part.words.start
            for rows, entries in part.tiles(tile_bytes):
                h = hidden[rows]
                d = tile_gradient(h, part.weight, part.bias, entries, totals[part.level, rows], grad[rows])
                d_bias[part.words] += d[:, :words].sum(0)
                d_cluster_bias += d[:, words:].sum(0) if part.level == 0 else 0
                d = d.to(h.dtype)
                d_hidden[rows] += d @ part.weight
                _add_product(d_weight[part.words], d[:, :words].mT, h)
                if part.level == 0:
                    _add_product(d_cluster_weight, d[:, words:].mT, h)
        return tuple(d.to(x.dtype) for d, x in zip(grads, inputs, strict=True))  # type: ignore[return-value]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, without a temporary of that size where the dtypes allow."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


@tiled_nll.register_fake
def _(hidden, parameters, targets, cutoffs, tile_bytes):  # type: ignore[no-untyped-def]
    nll = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    return nll, nll.new_empty(2, hidden.shape[0])


@tiled_nll_backward.register_fake
def _(grad, totals, *inputs):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, parameters, targets, ctx.cutoffs, ctx.tile_bytes = inputs
    ctx.save_for_backward(output[1], hidden, *parameters, targets)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    refuse_tangent(grad, "AdaptiveSoftmax")
    d_hidden, *grads = tiled_nll_backward(grad, *ctx.saved_tensors, ctx.cutoffs, ctx.tile_bytes)
    # An empty list counts as one of tensors.
    return d_hidden, grads, None, None if ctx.cutoffs else [], None


tiled_nll.register_autograd(_backward, setup_context=_setup_context)
