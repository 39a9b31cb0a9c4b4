"""The recurrence on the kernels, as executables and custom ops; Triton itself is imported when they first run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.family import coefficients
from fastweights.ops.features import Features
from fastweights.ops.gpu.memory.signatures import StepSignature, WalkSignature
from fastweights.ops.gpu.memory.variants import (
    from_integers,
    group_length,
    kept_shapes,
    number_of_groups,
    operand_dtype,
    to_integers,
)
from fastweights.ops.operator import Operator
from fastweights.ops.spec import Inputs


@cache
def _grouped() -> ModuleType:
    from fastweights.ops.gpu.memory import grouped

    return grouped


@cache
def _plan() -> Any:
    from fastweights.ops.gpu.memory.plan import plan

    return plan


@cache
def _one_token() -> Any:
    from fastweights.ops.gpu.memory.kernels.one_token import step

    return step


def _prove(signature: WalkSignature | StepSignature, q: Tensor) -> None:
    """Check kernels that a traced call asks for: whatever traced it had no numbers to check with."""
    from fastweights.ops.gpu.memory import self_check

    if reason := self_check.refusal(signature, q.shape[2], q.device):
        raise RuntimeError(f"{reason}; compile again with FASTWEIGHTS_BACKEND=chunked")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
    tied: bool,
    variant: Sequence[int],
    map: str,
    nu: int,
    sum: bool,
    logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y in `dtype`, the final W, and with `keep` the chunks' states (slots, H, M, D) and inverses (slots, H, C, C).

    Then, of a rule that erases, the tokens' errors (B, T, H, M); last the groups' transitions (groups, H, D, D). With
    `tied` the write gate is the erase gate, and w is None. The map and what follows are `Features`.
    """
    kernels, features = from_integers(variant), Features(map, nu, sum, logits)
    _prove(WalkSignature.of(q, v, (a, e, w), tied, cu_seqlens, kernels, features), q)
    rest = (W, cu_seqlens, dtype, W.dtype, tied, keep, kernels, features)
    *result, transitions = _grouped().forward(q, k, v, (a, e, w), *rest)
    return *result, W.new_empty((0, *W.shape[1:3], W.shape[2])) if transitions is None else transitions


def _fake(  # type: ignore[no-untyped-def]
    q, k, v, a, e, w, W, cu_seqlens, dtype, keep, tied, variant, map, nu, sum, logits
):
    kernels, (_, H, D, M) = from_integers(variant), W.shape
    kept = operand_dtype(q.dtype, W.dtype, kernels)
    shapes = kept_shapes((*q.shape[:3], D), M, e is not None, cu_seqlens, keep, kernels)
    states, inverses, errors = (q.new_empty(shape, dtype=kept) for shape in shapes)
    groups = q.shape[0] * number_of_groups(q.shape[1], cu_seqlens, kernels)
    transitions = W.new_empty((groups, H, D, D))
    return v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape), states, inverses, errors, transitions


def _backward(
    dy: Tensor,
    dW: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    states: Tensor,
    inverses: Tensor,
    errors: Tensor,
    transitions: Tensor,
    cu_seqlens: Tensor | None,
    tied: bool,
    variant: Sequence[int],
    map: str,
    nu: int,
    sum: bool,
    logits: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, the coefficients that are there, and the initial W, in this order."""
    wide, kept = torch.promote_types(q.dtype, torch.float32), (states, inverses, errors, transitions)
    rest = (*kept, cu_seqlens, wide, tied, True, from_integers(variant), Features(map, nu, sum, logits))
    dq, dk, dv, gates, dW = _grouped().backward(dy, dW, q, k, v, (a, e, w), *rest)
    return [dq, dk, dv, *(gate for gate in gates if gate is not None), dW]


def _forward_eagerly(
    inputs: tuple[Any, ...], W: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype, keep: bool, walk: Walk
) -> tuple[Tensor | None, ...]:
    return walk.forward(inputs, W, cu_seqlens, dtype, keep)


def _backward_eagerly(
    dy: Tensor,
    dW: Tensor | None,
    inputs: tuple[Any, ...],
    kept: tuple[Any, ...],
    cu_seqlens: Tensor | None,
    wants_state: bool,
    walk: Walk,
) -> list[Tensor | None]:
    dq, dk, dv, gates, dW = walk.backward(dy, dW, inputs, kept, cu_seqlens, wants_state)
    return [dq, dk, dv, *[gate for gate in gates if gate is not None], dW]


def _for_custom_op(kept: tuple[Any, ...], settings: tuple[Walk]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    states, *others, transitions = kept
    if transitions is None:
        _, H, _, D = states.shape
        transitions = states.new_empty((0, H, D, D))
    return (states, *others, transitions), settings[0].settings


OPERATOR = Operator(
    "triton_walk",
    _forward,
    _backward,
    _fake,
    state_size=lambda q, tied, variant, *features: Features(*features).size(q.shape[3]),
    heads=(1, 1, 2, 1),
    eager=(_forward_eagerly, _backward_eagerly),
    for_custom_op=_for_custom_op,
)


class Walk:
    """One recurrence of a call on its kernels, as `ops.family.Recurrence` has it; what follows from shapes is kept."""

    def __init__(self, signature: WalkSignature, eager: bool, gradients: bool = True) -> None:
        self.signature, self.eager = signature, eager
        # Where nobody wants gradients there is nothing that PyTorch has to know.
        self.direct = eager and not gradients
        self.plan: Any = None
        self.settings = (signature.tied, to_integers(signature.variant), *signature.features)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor | None,
        e: Tensor | None,
        w: Tensor | None,
        W: Tensor | None,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Compute y and the final W, from raw keys, queries and gates where the signature has features."""
        # The delta rule erases and writes with one gate: one to read, and one gradient instead of two and their sum.
        inputs = (q, k, v, a, e, None if self.signature.tied else w)
        # Kernels read bounds as a block of memory.
        bounds = None if cu_seqlens is None else cu_seqlens.contiguous()
        if self.direct:
            y, W_end, *_ = self.forward(inputs, W, bounds, dtype, False)
            assert y is not None and W_end is not None
            return y, W_end
        return OPERATOR(self.eager, inputs, W, bounds, dtype, self.settings, (self,))

    def forward(
        self, inputs: Sequence[Any], W: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype, keep: bool
    ) -> tuple[Tensor | None, ...]:
        """Return y, the final W and what is kept: states, inverses, errors and the groups' transitions."""
        if self.plan is not None:
            return *self.plan.forward(inputs, W, cu_seqlens, keep), None
        q, k, v, *gates = inputs
        how = (dtype, torch.promote_types(q.dtype, torch.float32), self.signature.tied)
        if group_length(q.shape[1], cu_seqlens, self.signature.variant):
            rest = (W, cu_seqlens, *how, keep, self.signature.variant, self.signature.features)
            return _grouped().forward(q, k, v, tuple(gates), *rest)
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        last = (self.signature.variant, self.signature.features)
        self.plan = _plan()(q, k, v, tuple(gates), N, cu_seqlens, *how, *last)
        self.plan.compile_ahead(keep)
        return *self.plan.forward(inputs, W, cu_seqlens, keep), None

    def backward(
        self,
        dy: Tensor,
        dW: Tensor | None,
        inputs: Sequence[Any],
        kept: Sequence[Any],
        cu_seqlens: Tensor | None,
        wants_state: bool,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...], Tensor | None]:
        """Return the gradients of q, k, v, the gates and, if it is wanted, W."""
        if self.plan is not None:
            return self.plan.backward(inputs, dy, dW, *kept[:3], cu_seqlens, wants_state)
        q, k, v, *gates = inputs
        wide = torch.promote_types(q.dtype, torch.float32)
        rest = (
            *kept,
            cu_seqlens,
            wide,
            self.signature.tied,
            wants_state,
            self.signature.variant,
            self.signature.features,
        )
        return _grouped().backward(dy, dW, q, k, v, tuple(gates), *rest)


@torch.library.custom_op("fastweights::triton_step", mutates_args=())
def step_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    W: Tensor,
    z: Tensor | None,
    tied: bool,
    map: str,
    nu: int,
    sum: bool,
    logits: bool,
) -> list[Tensor]:
    """y, W and, where it is given, z after one token (B, 1, H, ·); without gradients."""
    features, normalized = Features(map, nu, sum, logits), z is not None
    _prove(StepSignature.of_tensors(q, v, (a, e, w), tied, normalized, features), q)
    outputs = _one_token()(q, k, v, (a, e, w), W, z, q.dtype, tied, normalized, False, features)
    return [x for x in outputs if x is not None]


@step_op.register_fake
def _(q, k, v, a, e, w, W, z, tied, map, nu, sum, logits):  # type: ignore[no-untyped-def]
    outputs = [v.new_empty(v.shape), W.new_empty(W.shape)]
    return outputs if z is None else [*outputs, z.new_empty(z.shape)]


class OneToken:
    """A call of one token for each sequence, without gradients, on its kernel."""

    def __init__(self, signature: StepSignature, eager: bool) -> None:
        self.signature, self.eager = signature, eager

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute y, W and z after the token."""
        signature, q, k, v = self.signature, inputs.q, inputs.k, inputs.v
        a, e, w = coefficients(inputs)
        gates = (a, e, None if signature.tied else w)
        if not self.eager:
            W, z = inputs.initial_state()
            y, W, *rest = step_op(q, k, v, *gates, W, z, signature.tied, *signature.features)
            return y, W, rest[0] if rest else None
        features = (signature.tied, signature.normalized, inputs.in_place, signature.features)
        y, W_end, z_end = _one_token()(q, k, v, gates, inputs.W, inputs.z, q.dtype, *features)
        if inputs.W is not None and W_end is inputs.W:
            # Whoever kept it for a backward pass shall hear of it.
            torch.autograd.graph.increment_version(inputs.W)
        return y, W_end, z_end
