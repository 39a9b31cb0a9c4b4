"""The softmax kernels as custom operators, for autograd, `torch.compile` and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.common.transforms import refuse_tangent
from fastweights.ops.gpu.adaptive_softmax import launch
from fastweights.ops.gpu.adaptive_softmax.launch import Kept
from fastweights.ops.gpu.adaptive_softmax.self_check import refusal
from fastweights.ops.gpu.adaptive_softmax.variants import Config, configuration


def fused_nll(hidden: Tensor, parameters: Sequence[Tensor], targets: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Compute -log p(target) (N,) by kernels, NaN where there is no such word; `self_check.refuses` says for whom."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, *parameters))
    config = configuration(hidden.dtype, hidden.shape[1])
    nll, *_ = nll_and_kept(hidden, parameters, targets, cutoffs, keep, list(config))
    return nll


@torch.library.custom_op("fastweights::fused_nll", mutates_args=())
def nll_and_kept(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    targets: Tensor,
    cutoffs: Sequence[int],
    keep: bool,
    config: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute -log p(target) (N,) and the tensors of `Kept`, whose slope is empty without `keep`."""
    if reason := refusal(hidden, parameters[0]):
        raise RuntimeError(f"{reason}; compile again with AdaptiveSoftmax.backend = 'dense'")
    nll, kept = launch.forward(hidden, parameters, targets, cutoffs, keep, Config(*config))
    return nll, *kept


@torch.library.custom_op("fastweights::fused_nll_backward", mutates_args=())
def weight_gradients(
    grad: Tensor,
    slope: Tensor,
    totals: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    order: Tensor,
    entries: Tensor,
    starts: Tensor,
    cutoffs: Sequence[int],
    dtype: torch.dtype,
    config: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the four parameters in `dtype` from the tensors of `Kept`."""
    kept = Kept(slope, totals, hidden, weight, bias, order, entries, starts)
    return launch.backward(grad, kept, cutoffs, dtype, Config(*config))


@nll_and_kept.register_fake
def _(hidden, parameters, targets, cutoffs, keep, config):  # type: ignore[no-untyped-def]
    (N, d), rows = hidden.shape, len(parameters[0]) + len(cutoffs)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    kept = Kept(
        slope=hidden.new_empty((N if keep else 0, d)),
        totals=hidden.new_empty((2, N), dtype=wide),
        hidden=hidden.new_empty((N, d)),
        weight=hidden.new_empty((rows, d)),
        bias=hidden.new_empty(rows, dtype=wide),
        order=targets.new_empty(N),
        entries=targets.new_empty((2, N), dtype=torch.int32),
        starts=targets.new_empty(len(cutoffs) + 1, dtype=torch.int32),
    )
    return hidden.new_empty(N, dtype=wide), *kept


@weight_gradients.register_fake
def _(grad, *rest):  # type: ignore[no-untyped-def]
    *kept, cutoffs, dtype, _ = rest
    C, (rows, d) = len(cutoffs), Kept(*kept).weight.shape
    return tuple(grad.new_empty(shape, dtype=dtype) for shape in ((rows - C, d), (rows - C,), (C, d), (C,)))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, parameters, _, ctx.cutoffs, _, ctx.config = inputs
    ctx.dtype = parameters[0].dtype
    ctx.save_for_backward(*output[1:])
    # Zeros for the gradients of what only this file reads would be written for nothing.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    # An empty list counts as one of tensors.
    others: tuple[Any, ...] = (None, None if ctx.cutoffs else [], None, None)
    if grad is None:
        return None, [None] * 4, *others
    refuse_tangent(grad, "AdaptiveSoftmax")
    kept = Kept(*ctx.saved_tensors)
    d_hidden = (kept.slope * grad.unsqueeze(1)).to(kept.slope.dtype)
    grads = weight_gradients(grad, *kept, ctx.cutoffs, ctx.dtype, ctx.config)
    return d_hidden, list(grads), *others


nll_and_kept.register_autograd(_backward, setup_context=_setup_context)
