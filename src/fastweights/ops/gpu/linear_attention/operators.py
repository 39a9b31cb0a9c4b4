"""The kernels of linear attention for autograd in eager calls, and as custom operators for `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.common.transforms import refuse_tangent
from fastweights.ops.features import Features
from fastweights.ops.gpu.linear_attention import launch
from fastweights.ops.gpu.linear_attention.launch import Call
from fastweights.ops.gpu.linear_attention.self_check import unproven


def eager_forward(tensors: Sequence[Any], settings: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute y and what is kept, from q, k, v, mask and vectors, features and whether weights are normalised."""
    (q, k, v, mask, vectors), (features, normalized) = tensors, settings
    return launch.forward(Call.of(q, k, v, mask, features.description, normalized), q, k, v, mask, vectors)


def eager_backward(
    grads: Sequence[Any], tensors: Sequence[Any], settings: Sequence[Any], kept: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v; mask and vectors have none."""
    (q, k, v, mask, vectors), (features, normalized) = tensors, settings
    call = Call.of(q, k, v, mask, features.description, normalized)
    return *launch.backward(call, grads[0], q, k, v, mask, vectors, *kept), None, None


@torch.library.custom_op("fastweights::linear_attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    vectors: Tensor | None,
    phi: str,
    nu: int,
    m: int,
    inner: float,
    normalized: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute y (B, T, H, M) and what its gradients need, with the map called `phi`."""
    call = Call.of(q, k, v, mask, Features(phi, nu, m=m, inner=inner), normalized)
    if reason := unproven(call, q.shape[2], q.device):
        raise RuntimeError(f"{reason}; compile again, with FASTWEIGHTS_SELF_CHECK=0 if you want them all the same")
    y, W, z, c = launch.forward(call, q, k, v, mask, vectors)
    return y, W, z, c


@torch.library.custom_op("fastweights::linear_attention_backward", mutates_args=())
def gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    vectors: Tensor | None,
    W: Tensor,
    z: Tensor,
    c: Tensor,
    phi: str,
    nu: int,
    m: int,
    inner: float,
    normalized: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v."""
    call = Call.of(q, k, v, mask, Features(phi, nu, m=m, inner=inner), normalized)
    return launch.backward(call, dy, q, k, v, mask, vectors, W, z, c)


@attention.register_fake
def _(q, k, v, mask, vectors, phi, nu, m, inner, normalized):  # type: ignore[no-untyped-def]
    features, M = Features(phi, nu, m=m), v.shape[3]
    y = q.new_empty((*q.shape[:3], M))
    return y, *launch.empty_memory(launch.way_of(q, k, v, features), q, M, features)


@gradients.register_fake
def _(dy, q, k, v, mask, vectors, W, z, c, *settings):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.settings = inputs[5:]
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):  # type: ignore[no-untyped-def]
    if dy is None:
        return (None,) * 10
    refuse_tangent(dy, "linear_attention")
    found = gradients(dy, *ctx.saved_tensors, *ctx.settings)
    return *found, *[None] * 7


attention.register_autograd(_backward, setup_context=_setup_context)
