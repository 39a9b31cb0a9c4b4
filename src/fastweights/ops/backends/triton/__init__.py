"""Backend `triton`: the family's recurrence in fused GPU kernels; docs/kernels.md explains them."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from fastweights.ops import family
from fastweights.ops.backends.base import Backend
from fastweights.ops.backends.triton.configs import LARGEST_D, LARGEST_M
from fastweights.ops.backends.triton.ops import recurrence
from fastweights.ops.problem import Problem

CAPABILITY = (8, 0)


# Both ask the machine, not the problem: `torch.compile` may take the answer for a constant.
@torch.compiler.assume_constant_result
def interpreted() -> bool:
    """Whether Triton's interpreter is to run the kernels, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.compiler.assume_constant_result
def unavailable() -> str | None:
    """Why no kernel can run on this machine."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    most = max(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if most < CAPABILITY:
        return f"the GPU has compute capability {most[0]}.{most[1]}, the kernels need {CAPABILITY[0]}.{CAPABILITY[1]}"
    return None


def refuses(problem: Problem) -> str | None:
    """Why the kernels are not for this problem."""
    q, D, M = problem.q, problem.q.shape[3], problem.v.shape[3]
    if problem.rule.coefficients is None:
        return f"rule {problem.rule.name!r} is outside the family W = aW - e(aWk)k^T + w v k^T"
    # The accumulator of attention normalisation may come in as one more value column.
    if D > LARGEST_D or M + (problem.z is not None) > LARGEST_M:
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
    return None


BACKEND = Backend(
    name="triton",
    description="fused GPU kernels, states on chip: rules of the family, CUDA 8.0 and up, O(T/C) states kept",
    run=lambda problem: family.run(problem, recurrence),
    refuses=refuses,
    unavailable=unavailable,
)
