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
    return launch.forward(_call(tensors, settings), tensors)


def eager_backward(
    grads: Sequence[Any], tensors: Sequence[Any], settings: Sequence[Any], kept: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v; mask and vectors have none."""
    return *launch.backward(_call(tensors, settings), grads[0], tensors, kept), None, None


def _call(tensors: Sequence[Any], settings: Sequence[Any]) -> Call:
    (q, k, v, mask, _), (features, normalized) = tensors, settings
    return Call.of(q, k, v, mask, features.description, normalized)


# What both operators take: the inputs, and the map by its name.
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? vectors"
_SETTINGS = "str phi, SymInt nu, SymInt m, float inner, bool normalized"


def _settings(phi: str, nu: int, m: int, inner: float, normalized: bool) -> tuple[Features, bool]:
    return Features(phi, nu, m=m, inner=inner), normalized


@torch.library.custom_op(
    "fastweights::linear_attention",
    mutates_args=(),
    schema=f"({_INPUTS}, {_SETTINGS}) -> (Tensor y, Tensor W, Tensor z, Tensor c)",
)
def attention(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute y (B, T, H, M) and what its gradients need."""
    inputs, q = arguments[:5], arguments[0]
    call = _call(inputs, _settings(*arguments[5:]))
    if reason := unproven(call, q.shape[2], q.device):
        raise RuntimeError(f"{reason}; compile again, with FASTWEIGHTS_SELF_CHECK=0 if you want them all the same")
    return launch.forward(call, inputs)


@torch.library.custom_op(
    "fastweights::linear_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dy, {_INPUTS}, Tensor W, Tensor z, Tensor c, {_SETTINGS}) -> (Tensor dq, Tensor dk, Tensor dv)",
)
def gradients(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v."""
    inputs, kept = arguments[:5], arguments[5:8]
    return launch.backward(_call(inputs, _settings(*arguments[8:])), dy, inputs, kept)


@attention.register_fake
def _(q, k, v, mask, vectors, *settings):  # type: ignore[no-untyped-def]
    features, M = _settings(*settings)[0], v.shape[3]
    y = q.new_empty((*q.shape[:3], M))
    return y, *launch.empty_memory(launch.way_of(q, k, v, features), q, M, features)


@gradients.register_fake
def _(dy, q, k, v, *_):  # type: ignore[no-untyped-def]
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
