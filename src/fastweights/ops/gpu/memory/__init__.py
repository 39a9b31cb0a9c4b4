"""Backend `triton`: the family's recurrence in fused GPU kernels; docs/kernels.md explains them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import family
from fastweights.ops.backend import Backend
from fastweights.ops.gpu.device import interpreted, unavailable
from fastweights.ops.gpu.memory import self_check
from fastweights.ops.gpu.memory.autograd import again, recurrence, step, takes_step
from fastweights.ops.gpu.memory.kinds import AnyKind, Kind, StepKind
from fastweights.ops.gpu.memory.variants import (
    FEW,
    LARGEST_D,
    LARGEST_M,
    LARGEST_M_MAPPED,
    LONG,
    candidates,
    holds_features,
    may_go_by_token,
)
from fastweights.ops.problem import Problem


def why_unfused(problem: Problem) -> str | None:
    """Why the features of the problem have to be computed before the kernels run."""
    rule, (_, _, D, M) = problem.rule, problem.W.shape
    # The accumulator of attention normalisation may come in as one more value column.
    M += problem.z is not None
    if problem.features.sum and not problem.features.map:
        return "the kernels normalise what they map themselves, not keys that come mapped"
    if problem.features.map and not holds_features(D, M) and not takes_step(problem):
        limits = ", ".join(f"D = {most} beside M = {values}" for most, values in LARGEST_M_MAPPED.items())
        return f"phi has D = {D} features beside M = {M} values; inside the kernels there is room for up to {limits}"
    if problem.features.logits and rule.coefficients is not None and not family.takes_logits(rule):
        return f"rule {rule.name!r} computes its coefficients from gates, not from their logits"
    if takes_step(problem):
        return None
    if problem.z is not None and any(part.erase for part in family.parts(problem)):
        return f"attention normalisation of rule {rule.name!r} divides a gate by what the keys give"
    return None


def refuses(problem: Problem) -> str | None:
    """Why the kernels are not for this problem."""
    q, (_, _, D, M) = problem.q, problem.W.shape
    if problem.rule.coefficients is None:
        return f"rule {problem.rule.name!r} is outside the family W = aW - e(aWk)k^T + w v k^T"
    if D > LARGEST_D or M > LARGEST_M:
        return f"keys may have up to {LARGEST_D} and values up to {LARGEST_M} features, got D = {D} and M = {M}"
    if interpreted():
        if q.device.type != "cpu":
            return f"Triton's interpreter runs on the CPU, the tensors are on {q.device}"
        if q.dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
        return None
    if q.device.type != "cuda":
        return f"the kernels run on CUDA devices, the tensors are on {q.device}"
    if q.dtype == torch.float64:
        return "the kernels compute in float32, bfloat16 and float16, not in float64"
    # Tracing has no numbers to check with; the custom op checks when it first runs.
    return None if torch.compiler.is_compiling() else _unproven(problem)


_decided: dict[tuple[Any, ...], str | None] = {}


def _unproven(problem: Problem) -> str | None:
    """Which of the kernels that the problem needs failed their self-check."""
    q, (N, H, D, M), features = problem.q, problem.W.shape, problem.features
    packed, walks, one = problem.cu_seqlens is not None, min(N * H, FEW + 1), takes_step(problem)
    # Only few long walks, or one token, depend on more than on whether they are long.
    T = q.shape[1]
    if T != 1 and (walks > FEW or T < LONG):
        T = min(T, LONG) // LONG * LONG
    form = (problem.z is None, problem.starts is None, packed, walks, T, features, one)
    key = (problem.rule.coefficients, q.dtype, q.device, H, D, M, *form)
    if key not in _decided:
        kinds: list[AnyKind] = []
        if one:
            kinds.append(StepKind.of_problem(problem))
        else:
            for part in family.parts(problem, LARGEST_M):
                by_token = may_go_by_token(part.decay, H, D, part.M)
                variants = candidates(D, part.M, part.dtype, walks, T, features, by_token)
                options = [Kind(part.dtype, q.shape[3], *part[1:], packed, variant, features) for variant in variants]
                kinds.append(self_check.first_right(options, H, q.device))
        reasons = (self_check.refusal(kind, H, q.device) for kind in kinds)
        _decided[key] = next((reason for reason in reasons if reason), None)
    return _decided[key]


def run(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, W and z."""
    if takes_step(problem):
        return step(problem)
    return family.run(problem, partial(recurrence, features=problem.features), LARGEST_M)


BACKEND = Backend(
    name="triton",
    description="fused GPU kernels, states on chip: rules of the family, CUDA 8.0 and up, states and errors kept",
    run=run,
    refuses=refuses,
    unavailable=unavailable,
    again=again,
)
