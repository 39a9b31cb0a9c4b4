"""Can Triton's kernels run here? Facts about the machine, which no call changes; Triton itself is not imported."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastweights.common.transforms import is_transformed

LEAST_CAPABILITY = (8, 0)


def interpreted() -> bool:
    """Return whether Triton's interpreter is to run the kernels, on tensors of the CPU."""
    return _interpreted()


@cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    """Say why no kernel can run on this machine, None if some can."""
    return _unavailable()


@cache
def _unavailable() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = max(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if capability < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, the kernels need {needed}"
    return None


# `torch.compile` may take their answers for constants. This is all that `torch.compiler.assume_constant_result` does,
# after importing the compiler, which takes a second.
for _function in (interpreted, unavailable):
    vars(_function)["_dynamo_marked_constant"] = True


def refuses(x: Tensor, dtypes: Collection[torch.dtype], interpreted_dtypes: Collection[torch.dtype]) -> str | None:
    """Say why kernels that take `dtypes`, and in the interpreter others, are not for this call with x."""
    if reason := unavailable():
        return reason
    if is_transformed():
        return "a torch.func transform or forward-mode derivative is active, which only plain PyTorch can follow"
    if interpreted():
        right = x.device.type == "cpu" and x.dtype in interpreted_dtypes
        return None if right else f"Triton's interpreter takes {_names(interpreted_dtypes)} on the CPU, not {x.dtype}"
    if x.device.type != "cuda":
        return f"the kernels run on CUDA devices, the tensors are on {x.device}"
    return None if x.dtype in dtypes else f"the kernels take {_names(dtypes)}, not {x.dtype}"


def _names(dtypes: Collection[torch.dtype]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def use_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the GPU of x the current one, where kernels are launched; nothing for a tensor of the CPU."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
