"""The adaptive softmax in fused GPU kernels, for autograd, `torch.compile` and CUDA graphs.

The forward pass also finds the gradient of each loss by its hidden vector, which costs one product and saves making the
logits once more; the backward pass makes them again for the weights alone. Nothing waits for the device, and no shape
depends on the data. Triton is imported when the kernels first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """One row of the table. All integers, so that it passes through a custom op.

    The forward pass takes `tile` tokens and `step` rows of weights at a time, the backward pass `back_tile` rows and
    `back_step` tokens. In the forward pass a softmax of few tokens is split into parts of its rows, of `least` rows or
    more, in the backward pass the head into parts of the tokens, so that each makes up to `parts` programs.
    """

    tile: int
    step: int
    warps: int
    stages: int
    back_tile: int
    back_step: int
    back_warps: int
    back_stages: int
    parts: int = 512
    least: int = 1024


# The largest d_model a row is for, smallest first. Four warps: at eight Triton 3.6 has miscompiled other kernels.
TABLE: dict[torch.dtype, dict[int, Config]] = {
    torch.bfloat16: {
        64: Config(128, 64, 4, 3, 128, 64, 4, 3),
        128: Config(128, 32, 4, 3, 128, 32, 4, 3),
        256: Config(64, 32, 4, 3, 64, 32, 4, 3),
    },
    torch.float32: {128: Config(64, 16, 4, 2, 64, 16, 4, 2)},
    # The interpreter only.
    torch.float64: {256: Config(16, 16, 4, 1, 16, 16, 4, 1, parts=4, least=16)},
}
# 16-bit products need no more; float32 is made of three TF32 products, as in the memory's kernels.
PRECISION = {torch.bfloat16: "ieee", torch.float32: "tf32x3", torch.float64: "ieee"}


def configuration(dtype: torch.dtype, d: int) -> Config:
    """The shipped configuration for hidden vectors of size d."""
    return next(config for largest, config in TABLE[dtype].items() if largest >= d)


@cache
def _kernels() -> ModuleType:
    from fastweights.layers import adaptive_kernels

    return adaptive_kernels


@cache
def _bounds(cutoffs: tuple[int, ...], words: int, device: str) -> tuple[Tensor, Tensor]:
    """Where clusters begin and the words end (S,), and where the rows of each softmax do (S + 1,).

    Kept, because a copy from the host can be no part of a CUDA graph.
    """
    ends = (*cutoffs, words)
    rows = (0, *(end + len(cutoffs) for end in ends))
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, rows))  # type: ignore[return-value]


def _sizes(cutoffs: Sequence[int], words: int) -> list[int]:
    """Rows of each softmax; the head has those of the clusters too."""
    sizes = [high - low for low, high in pairwise((0, *cutoffs, words))]
    return [sizes[0] + len(cutoffs), *sizes[1:]]


def _slots(tokens: int, cutoffs: Sequence[int], words: int, config: Config) -> int:
    """Room for the parts of all softmaxes, wherever the targets fall."""
    tiles = -(-tokens // config.tile)
    sizes = _sizes(cutoffs, words)
    return sum(min(max(config.parts, tiles), -(-size // config.least) * tiles) for size in sizes)


def _packed(words: Tensor, clusters: Tensor, cutoffs: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The rows in the order of the kernels, cast on the way: the head's words, the clusters, the other words."""
    rows = words.new_empty((len(words) + len(clusters), *words.shape[1:]), dtype=dtype)
    size = cutoffs[0] if cutoffs else len(words)
    rows[:size].copy_(words[:size])
    if cutoffs:
        rows[size : size + len(clusters)].copy_(clusters)
        rows[size + len(clusters) :].copy_(words[size:])
    return rows


def _constants(hidden: Tensor, cutoffs: Sequence[int]) -> dict[str, Any]:
    """The compile-time arguments that all kernels take."""
    d = hidden.shape[1]
    return {"S": len(cutoffs) + 1, "D": d, "BLOCK_D": max(16, 1 << (d - 1).bit_length())}


def _accumulator(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def _device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@torch.library.custom_op("fastweights::fused_nll", mutates_args=())
def fused_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    cluster_weight: Tensor,
    cluster_bias: Tensor,
    targets: Tensor,
    cutoffs: list[int],
    keep: bool,
    config: Sequence[int],
    trusted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-log p(target) (N,), NaN where there is no such word; with `keep` also its gradient by `hidden` (N, d).

    Then what the gradient of the weights needs, tokens in the order of their targets: log-sum-exps (2, N) in base 2,
    hidden vectors (N, d), rows (V + C, d) and biases of all softmaxes, the order, the targets' rows (2, N), and where
    the clusters begin. Without `trusted` the kernels must have passed their self-check.
    """
    if not trusted:
        from fastweights.layers.adaptive_check import distrust

        if reason := distrust(hidden, weight):
            raise RuntimeError(f"{reason}; compile again with AdaptiveSoftmax.backend = 'dense'")
    kernels, setting = _kernels(), Config(*config)
    hidden = hidden.contiguous()
    (N, d), V = hidden.shape, len(weight)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    ends, rows = _bounds(tuple(cutoffs), V, str(hidden.device))
    # No number of 64 bits may come back as a word.
    words, order = targets.clamp(-1, V).to(torch.int32).sort(stable=True)
    starts = torch.searchsorted(words, ends, out_int32=True)
    packed = _packed(weight, cluster_weight, cutoffs, hidden.dtype)
    packed_bias = _packed(bias, cluster_bias, cutoffs, wide)
    x, entries = torch.empty_like(hidden), words.new_empty(2, N)
    nll, totals = hidden.new_empty(N, dtype=wide), hidden.new_zeros(2, N, dtype=wide)
    slope = hidden.new_empty(N if keep else 0, d)
    slots = _slots(N, cutoffs, V, setting)
    partial_totals = hidden.new_empty(slots, setting.tile, dtype=wide)
    partial_means = hidden.new_empty(slots if keep else 0, setting.tile, d)
    constants = _constants(hidden, cutoffs)
    split = {"TILE": setting.tile, "STEP": setting.step, "PARTS": setting.parts, "LEAST": setting.least}
    split |= {**constants, "KEEP": keep, "ACC": _accumulator(hidden.dtype)}
    with _device(hidden):
        kernels.arrange[(-(-N // 16),)](hidden, order, words, ends, x, entries, N, **constants, TILE=16, num_warps=4)
        kernels.partial_softmax[(slots,)](
            *(x, packed, packed_bias, starts, rows, partial_totals, partial_means, N),
            **split,
            PRECISION=PRECISION[hidden.dtype],
            num_warps=setting.warps,
            num_stages=setting.stages,
        )
        kernels.finish[(N,)](
            *(x, packed, packed_bias, order, words, entries, starts, rows, partial_totals, partial_means),
            *(nll, slope, totals, N, V),
            **split,
            CHUNK=8,
            num_warps=1,
        )
    return nll, slope, totals, x, packed, packed_bias, order, entries, starts


@torch.library.custom_op("fastweights::fused_nll_backward", mutates_args=())
def fused_nll_backward(
    grad: Tensor,
    totals: Tensor,
    x: Tensor,
    packed: Tensor,
    packed_bias: Tensor,
    order: Tensor,
    entries: Tensor,
    starts: Tensor,
    cutoffs: list[int],
    dtype: torch.dtype,
    config: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the four parameters, in `dtype`: every program has rows of its own and walks over their tokens."""
    kernels, setting = _kernels(), Config(*config)
    C, d = len(cutoffs), x.shape[1]
    V, (head, *clusters) = len(packed) - C, _sizes(cutoffs, len(packed) - C)
    _, rows = _bounds(tuple(cutoffs), V, str(x.device))
    d_weight, d_bias = x.new_empty(V, d, dtype=dtype), x.new_empty(V, dtype=dtype)
    tiles = -(-head // setting.back_tile)
    parts = max(1, min(setting.parts // tiles, -(-len(x) // setting.back_step)))
    wide = torch.promote_types(x.dtype, torch.float32)
    d_head, d_head_bias = x.new_empty(parts, head, d, dtype=wide), x.new_empty(parts, head, dtype=wide)
    with _device(x):
        kernels.weight_gradient[(parts * tiles + sum(-(-size // setting.back_tile) for size in clusters),)](
            *(x, packed, packed_bias, entries, starts, rows, totals, grad.index_select(0, order)),
            *(d_head, d_head_bias, d_weight, d_bias, len(x)),
            **_constants(x, cutoffs),
            TILE=setting.back_tile,
            STEP=setting.back_step,
            PARTS=parts,
            ACC=_accumulator(x.dtype),
            PRECISION=PRECISION[x.dtype],
            num_warps=setting.back_warps,
            num_stages=setting.back_stages,
        )
    found = []
    for whole, split in ((d_weight, d_head), (d_bias, d_head_bias)):
        sums = split.sum(0)
        whole[: head - C].copy_(sums[: head - C])
        found += [whole, sums[head - C :].to(dtype, copy=True)]
    d_weight, d_cluster_weight, d_bias, d_cluster_bias = found
    return d_weight, d_bias, d_cluster_weight, d_cluster_bias


@fused_nll.register_fake
def _(hidden, weight, bias, cluster_weight, cluster_bias, targets, cutoffs, keep, config, trusted):  # type: ignore[no-untyped-def]
    (N, d), rows, wide = hidden.shape, len(weight) + len(cutoffs), torch.promote_types(hidden.dtype, torch.float32)
    kept = (N, d) if keep else (0, d)
    return (
        hidden.new_empty(N, dtype=wide),
        hidden.new_empty(kept),
        hidden.new_empty((2, N), dtype=wide),
        hidden.new_empty((N, d)),
        hidden.new_empty((rows, d)),
        hidden.new_empty(rows, dtype=wide),
        targets.new_empty(N),
        targets.new_empty((2, N), dtype=torch.int32),
        targets.new_empty(len(cutoffs) + 1, dtype=torch.int32),
    )


@fused_nll_backward.register_fake
def _(grad, totals, x, packed, packed_bias, order, entries, starts, cutoffs, dtype, config):  # type: ignore[no-untyped-def]
    C, d = len(cutoffs), x.shape[1]
    V = len(packed) - C
    return tuple(x.new_empty(shape, dtype=dtype) for shape in ((V, d), (V,), (C, d), (C,)))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.cutoffs, ctx.config, ctx.dtype = inputs[6], inputs[8], inputs[1].dtype
    ctx.save_for_backward(*output[1:])
    # Zeros for the gradients of what only this file reads would be written for nothing.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 10
    slope, *kept = ctx.saved_tensors
    d_hidden = (slope * grad.unsqueeze(1)).to(slope.dtype)
    grads = fused_nll_backward(grad, *kept, ctx.cutoffs, ctx.dtype, ctx.config)
    return d_hidden, *grads, None, None, None, None, None


fused_nll.register_autograd(_backward, setup_context=_setup_context)
