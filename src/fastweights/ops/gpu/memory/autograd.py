"""The recurrence on the kernels, as executables and custom ops; Triton itself is imported when they first run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.causality import Tokens
from fastweights.ops.features import Features
from fastweights.ops.gpu.memory.buffers import kept_shapes, operand_dtype
from fastweights.ops.gpu.memory.signatures import StepSignature, WalkSignature
from fastweights.ops.gpu.memory.strides import Gates
from fastweights.ops.gpu.memory.variants import from_integers, number_of_groups, to_integers
from fastweights.ops.operator import TOKENS, Kept, Operator, Passes
from fastweights.ops.spec import Inputs

_FEATURES = "str map, SymInt nu, bool sum, bool logits"


def _step_plan(*arguments: Any) -> Any:
    from fastweights.ops.gpu.memory.step import step_plan

    return step_plan(*arguments)


def _prove(signature: WalkSignature | StepSignature, q: Tensor) -> None:
    """Check kernels that a traced call asks for: whatever traced it had no numbers to check with."""
    from fastweights.ops.gpu.memory import self_check

    if reason := self_check.refusal(signature, q.shape[2], q.device):
        raise RuntimeError(f"{reason}; compile again with FASTWEIGHTS_BACKEND=chunked")


def _forward(
    tokens: Tokens, W: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype, keep: bool, *settings: Any
) -> Sequence[Tensor]:
    """Return y in `dtype`, the final W, and with `keep` the chunks' states (slots, H, M, D), their tiles.

    Then, of a rule that erases, the tokens' errors (B, T, H, M); last the groups' transitions (groups, H, D, D). The
    settings are whether the write gate is the erase gate, and w None, the variant as integers, and the `Features`.
    """
    (q, _, v, a, e, w), (tied, integers, *features) = tokens, settings
    variant = from_integers(integers)
    _prove(WalkSignature.of(q, v, (a, e, w), tied, cu_seqlens, variant, Features(*features)), q)
    y, W_end, *kept = _plan(tokens, cu_seqlens, dtype, keep, *settings).forward(tokens, W, cu_seqlens, keep)
    if not keep:
        # Eager calls share what stands for it; an operator must return tensors of its own.
        kept = _empty(tokens, W, cu_seqlens, False, *settings)
    elif len(kept) == 3:
        kept.append(W.new_empty((0, *W.shape[1:3], W.shape[2])))
    return y, W_end, *kept


def _backward(
    dy: Tensor, dW: Tensor | None, tokens: Tokens, kept: Kept, cu_seqlens: Tensor | None, *settings: Any
) -> list[Tensor]:
    """Return the gradients of q, k, v, the coefficients that are there, and the initial W, in this order."""
    plan = _plan(tokens, cu_seqlens, dy.dtype, True, *settings)
    return [x for x in plan.backward(tokens, dy, dW, kept, cu_seqlens, True) if x is not None]


def _empty(tokens: Tokens, W: Tensor, cu_seqlens: Tensor | None, keep: bool, *settings: Any) -> list[Tensor]:
    """Return empty tensors for what the forward pass keeps, without slots where that is nothing."""
    q, (_, H, D, M), variant = tokens[0], W.shape, from_integers(settings[1])
    dtype = operand_dtype(q.dtype, W.dtype, variant)
    shapes = kept_shapes((*q.shape[:3], D), M, tokens[4] is not None, cu_seqlens, variant)
    groups = q.shape[0] * number_of_groups(q.shape[1], cu_seqlens, variant)
    kinds = [*((shape, dtype) for shape in shapes), ((groups, H, D, D), W.dtype)]
    return [q.new_empty((slots if keep else 0, *rest), dtype=dtype) for (slots, *rest), dtype in kinds]


def _plan(tokens: Tokens, cu_seqlens: Tensor | None, dtype: torch.dtype, keep: bool, *settings: Any) -> Passes:
    """Return how to run calls like this one."""
    from fastweights.ops.gpu.memory.grouped import plan_walks

    tied, integers, *features = settings
    return plan_walks(tokens, cu_seqlens, dtype, keep, tied, from_integers(integers), Features(*features))


OPERATOR = Operator(
    "triton_walk",
    _forward,
    _backward,
    f"bool tied, SymInt[] variant, {_FEATURES}",
    {"states": 1, "tiles": 1, "errors": 2, "transitions": 1},
    _empty,
    state_size=lambda q, tied, variant, *features: Features(*features).size(q.shape[3]),
    plan=_plan,
)


def walk(signature: WalkSignature, eager: bool, gradients: bool = True) -> Callable[..., Any]:
    """Return the recurrence on the kernels of a signature, as `ops.family.Recurrence` has it."""
    settings = (signature.tied, to_integers(signature.variant), *signature.features[:4])
    return OPERATOR.bind(settings, eager, gradients, signature.tied)


def _step(
    q: Tensor, k: Tensor, v: Tensor, a: Any, e: Any, w: Any, W: Tensor, z: Tensor | None, tied: bool, *features: Any
) -> list[Tensor]:
    """Return y, W and, where there is one, z after one token (B, 1, H, ·); without gradients."""
    gates, normalized = (a, e, w), z is not None
    _prove(StepSignature.of_tensors(q, v, gates, tied, normalized, Features(*features)), q)
    outputs = _step_plan(q, k, v, gates, tied, normalized, Features(*features))(q, k, v, gates, W, z, False)
    return [x for x in outputs if x is not None]


step_op: Any = torch.library.custom_op(
    "fastweights::triton_step",
    _step,
    mutates_args=(),
    schema=f"({TOKENS}, Tensor W, Tensor? z, bool tied, {_FEATURES}) -> Tensor[]",
)


@step_op.register_fake
def _(q, k, v, a, e, w, W, z, *settings):  # type: ignore[no-untyped-def]
    outputs = [v.new_empty(v.shape), W.new_empty(W.shape)]
    return outputs if z is None else [*outputs, z.new_empty(z.shape)]


class OneToken:
    """A call of one token for each sequence, without gradients, on its kernel."""

    def __init__(self, signature: StepSignature, coefficients: Callable[[Inputs], Gates], eager: bool) -> None:
        self.signature, self.coefficients, self.eager = signature, coefficients, eager
        self.plan: Any = None

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute y, W and z after the token."""
        signature, q, k, v = self.signature, inputs.q, inputs.k, inputs.v
        a, e, w = self.coefficients(inputs)
        gates = (a, e, None if signature.tied else w)
        if not self.eager:
            W, z = inputs.initial_state()
            y, W, *rest = step_op(q, k, v, *gates, W, z, signature.tied, *signature.features[:4])
            return y, W, rest[0] if rest else None
        if self.plan is None:
            how = (signature.tied, signature.normalized, signature.features)
            self.plan = _step_plan(q, k, v, gates, *how)
        y, W_end, z_end = self.plan(q, k, v, gates, inputs.W, inputs.z, inputs.in_place)
        if inputs.W is not None and W_end is inputs.W:
            # Whoever kept it for a backward pass shall hear of it.
            torch.autograd.graph.increment_version(inputs.W)
        return y, W_end, z_end
