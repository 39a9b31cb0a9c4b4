"""The adaptive softmax in eager calls on the CPU, which keeps the probabilities it has room for.

With P the probabilities of a tile, e its targets' rows in W and g the gradient of its losses, the gradients are

    dh = g (P W - W[e]),   dW = P^T (g h), less g h in rows e.

Nothing but products goes over P once more, and logits are not made a second time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.common.transforms import refuse_tangent
from fastweights.ops.cpu.products import outer_product, product
from fastweights.ops.cpu.softmax import softmax_nll
from fastweights.ops.fused.function import FusedFunction, Kernels, Tensors
from fastweights.ops.losses.adaptive_softmax import Part, parts_of, tiled_nll

# Logits of a tile, in bytes, that stay in a processor's cache between the passes over them.
CACHED_BYTES = 2**23


def kept_nll(
    hidden: Tensor, parameters: Sequence[Tensor], targets: Tensor, cutoffs: Sequence[int], tile_bytes: int
) -> Tensor:
    """Compute -log p(target) (N,), as `tiled_nll` does; probabilities of up to `tile_bytes` are kept for gradients."""
    return _FUNCTION((hidden, *parameters, targets), tuple(cutoffs), tile_bytes)[0]


def _plain(hidden: Tensor, *others: Any) -> tuple[Tensor]:
    *parameters, targets, cutoffs, tile_bytes = others
    return (tiled_nll(hidden, parameters, targets, list(cutoffs), tile_bytes)[0],)


def _refuses(tensors: Tensors, settings: Tensors) -> str | None:
    for x in tensors[:-1]:
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or x.dtype != tensors[0].dtype:
            return f"it takes float32 or float64 on the CPU, a tensor is {x.dtype} on {x.device}"
    return None


def _tiles(tensors: Tensors, settings: Tensors) -> Iterator[tuple[Part, Any, Tensor]]:
    """Yield the softmaxes, tokens and entries of all tiles."""
    hidden, *parameters, targets = tensors
    cutoffs, tile_bytes = settings
    for part in parts_of(parameters, targets, cutoffs, hidden.dtype):
        for rows, entries in part.tiles(min(tile_bytes, CACHED_BYTES)):
            yield part, rows, entries


def _softmax(part: Part, hidden: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of a tile and the losses of its targets."""
    return softmax_nll(product(hidden, part.weight, part.bias), entries)


def _forward(tensors: Tensors, settings: Tensors) -> tuple[Tensor, ...]:
    hidden, bytes_left = tensors[0], settings[1]
    nll = hidden.new_zeros(len(hidden))
    kept: list[Tensor] = []
    for part, rows, entries in _tiles(tensors, settings):
        p, losses = _softmax(part, hidden[rows], entries)
        nll[rows] += losses
        bytes_left -= p.nbytes
        if bytes_left >= 0:
            kept.append(p)
    return nll, *kept


def _backward(grads: Tensors, tensors: Tensors, settings: Tensors, kept: Tensors) -> Tensors:
    refuse_tangent(grads[0], "AdaptiveSoftmax")
    hidden, gradients = tensors[0], [torch.zeros_like(x) for x in tensors[:-1]]
    d_hidden, d_weight, d_bias, d_cluster_weight, d_cluster_bias = gradients
    for i, (part, rows, entries) in enumerate(_tiles(tensors, settings)):
        h, g = hidden[rows], grads[0][rows]
        p = kept[i] if i < len(kept) else _softmax(part, h, entries)[0]
        gh = h * g.unsqueeze(1)
        d_hidden[rows] += (product(p, part.weight.mT) - part.weight[entries]) * g.unsqueeze(1)
        rows_of_weight = outer_product(p, gh).contiguous().index_add_(0, entries, gh, alpha=-1)
        rows_of_bias = torch.mv(p.mT, g).index_add_(0, entries, g, alpha=-1)
        words = part.words.stop - part.words.start
        d_weight[part.words] += rows_of_weight[:words]
        d_bias[part.words] += rows_of_bias[:words]
        if part.level == 0:
            d_cluster_weight += rows_of_weight[words:]
            d_cluster_bias += rows_of_bias[words:]
    return *gradients, None


_FUNCTION = FusedFunction(_plain, Kernels(_forward, _backward, _refuses), outputs=1)
