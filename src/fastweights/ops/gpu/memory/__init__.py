"""Backend `triton`: the family's recurrence in fused GPU kernels; docs/kernels.md explains them."""

from __future__ import annotations

import torch

from fastweights.ops import family
from fastweights.ops.features import PLAIN
from fastweights.ops.gpu.device import interpreted, unavailable
from fastweights.ops.gpu.memory import self_check
from fastweights.ops.gpu.memory.autograd import OneToken, walk
from fastweights.ops.gpu.memory.containment import contain
from fastweights.ops.gpu.memory.signatures import StepSignature, WalkSignature
from fastweights.ops.gpu.memory.variants import (
    LARGEST_D,
    LARGEST_HEAD_MAPPED,
    LARGEST_M,
    LARGEST_M_MAPPED,
    candidates,
    holds_features,
    may_go_by_token,
    per_key_candidates,
)
from fastweights.ops.spec import Backend, Executable, Refusal, Spec, expanding_first, prepare_mapped


def prepare(spec: Spec) -> Executable | Refusal:
    """Answer with the kernels for a call, maps on chip where there is room for them, or say why there are none."""
    if reason := _refusal(spec):
        return Refusal(reason)
    if why_unfused(spec):
        return prepare_mapped(prepare, spec)
    if spec.starts is not None:
        answer = _prepare(spec)
        return answer if isinstance(answer, Refusal) else contain(answer)
    return _prepare(spec)


def _prepare(spec: Spec) -> Executable | Refusal:
    """Answer with the kernels for keys, queries and gates as the kernels take them."""
    if _is_one_step(spec):
        signature = StepSignature.of(spec)
        reason = _unproven(signature, spec)
        coefficients = family.coefficients_for(spec, logs=spec.per_key)
        return Refusal(reason) if reason else OneToken(signature, coefficients, spec.eager)
    walks = []
    for part in family.parts(spec, LARGEST_M):
        answer = _walk(spec, part)
        if isinstance(answer, Refusal):
            return answer
        walks.append(answer)
    return family.executable(spec, *walks, most=LARGEST_M, logs=spec.per_key)


def _walk(spec: Spec, part: family.RecurrenceForm) -> family.Recurrence | Refusal:
    """Return the best walk for a part of a call that is right on this machine."""
    per_key = spec.per_key and part.decay
    if per_key:
        variants = per_key_candidates(spec.D, part.M, part.dtype, spec.T)
    else:
        by_token = may_go_by_token(part.decay, spec.H, spec.D, part.M)
        variants = candidates(spec.D, part.M, part.dtype, spec.N * spec.H, spec.T, spec.features, by_token)
    reason = None
    for variant in variants:
        signature = WalkSignature(part.dtype, spec.shape[3], *part[1:], spec.packed, variant, spec.features, per_key)
        reason = _unproven(signature, spec)
        if reason is None:
            return walk(signature, spec.eager, spec.gradients)
    assert reason is not None
    return Refusal(reason)


def _unproven(signature: WalkSignature | StepSignature, spec: Spec) -> str | None:
    """Say why kernels must not be used. Tracing has no numbers to check with; custom ops check when they first run."""
    if interpreted() or torch.compiler.is_compiling():
        return None
    return self_check.refusal(signature, spec.H, spec.device)


def _is_one_step(spec: Spec) -> bool:
    """Return whether the call is one token for each sequence, and nobody wants gradients."""
    return spec.T == 1 and not spec.packed and not spec.gradients


def why_unfused(spec: Spec) -> str | None:
    """Say why the features of a call have to be computed before the kernels run; None where they need not."""
    features, rule, R, D = spec.features, spec.rule, spec.shape[3], spec.D
    # The accumulator of attention normalisation may come in as one more value column.
    M, one = spec.M + spec.normalized, _is_one_step(spec)
    if features.map in ("other", "silu", "favor") or features.l2 or features.scale != 1:
        return "the kernels do not know this feature map or normalisation"
    if spec.per_key and features != PLAIN:
        return "decays per key channel go with keys and gates as the memory takes them"
    if features.sum and not features.maps:
        return "the kernels normalise what they map themselves, not keys that come mapped"
    if features.maps and not holds_features(R, D, M) and not one:
        limits = ", ".join(f"D = {most} beside M = {values}" for most, values in LARGEST_M_MAPPED.items())
        return (
            f"phi has D = {D} features beside M = {M} values, of heads of {R}; inside the kernels there is room for up "
            f"to {limits}, where DPFP makes more than {min(LARGEST_M_MAPPED)} of heads of {LARGEST_HEAD_MAPPED} at most"
        )
    if features.logits and spec.logarithms:
        return "beside logits of other gates, the kernels take no logarithms of decays"
    if features.logits and not family.takes_logits(rule):
        return f"rule {rule.name!r} computes its coefficients from gates, not from their logits"
    if spec.normalized and not one and not rule.only_adds and (features.maps or features.logits):
        return f"attention normalisation of rule {rule.name!r} divides a gate by what the keys give"
    return None


def _refusal(spec: Spec) -> str | None:
    """Say why the kernels are not for such a call."""
    if reason := family.outside(spec.rule):
        return reason
    if spec.per_key and not family.in_logarithms(spec):
        return "decays per key channel have to come as logarithms, under the name log_decay"
    if spec.D > LARGEST_D or spec.M > LARGEST_M:
        limits = f"keys may have up to {LARGEST_D} and values up to {LARGEST_M} features"
        return f"{limits}, got D = {spec.D} and M = {spec.M}"
    if interpreted():
        if spec.device.type != "cpu":
            return f"Triton's interpreter runs on the CPU, the tensors are on {spec.device}"
        return "Triton's interpreter computes bfloat16 wrongly" if spec.dtype == torch.bfloat16 else None
    if spec.device.type != "cuda":
        return f"the kernels run on CUDA devices, the tensors are on {spec.device}"
    if spec.dtype == torch.float64:
        return "the kernels compute in float32, bfloat16 and float16, not in float64"
    return None


BACKEND = Backend(
    name="triton",
    description="fused GPU kernels, states on chip: linear rules, compute capability 8.0 and up",
    prepare=expanding_first(prepare),
    unavailable=unavailable,
)
