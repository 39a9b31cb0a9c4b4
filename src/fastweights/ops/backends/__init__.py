"""The backends, fastest first. To add one: a module with a `BACKEND` in this folder and its line in `BACKENDS`."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.ops.backend import Again, Backend
from fastweights.ops.backends import chunked, reference
from fastweights.ops.cpu import backend as cpu
from fastweights.ops.features import PLAIN
from fastweights.ops.gpu import memory as triton
from fastweights.ops.gpu.device import interpreted, unavailable
from fastweights.ops.problem import Problem

BACKENDS: dict[str, Backend] = {module.BACKEND.name: module.BACKEND for module in (triton, cpu, chunked, reference)}

ENVIRONMENT = "FASTWEIGHTS_BACKEND"


def list_backends() -> dict[str, str]:
    """Name and one-line description of every backend, in the order in which "auto" tries them."""
    return {name: backend.description for name, backend in BACKENDS.items()}


def run(problem: Problem, name: str = "auto") -> tuple[Tensor, Tensor, Tensor | None]:
    """(y, W, z) by the backend that `select` finds; what it does not fuse is mapped before."""
    if problem.features != PLAIN and why_unfused(problem, name) is not None:
        problem = problem.mapped()
    return select(problem, name).run(problem)


def again(problem: Problem, name: str = "auto") -> Again | None:
    """The shortest way to run problems like this one, which was run; see `Backend.again`."""
    if problem.features != PLAIN and why_unfused(problem, name) is not None:
        return None
    backend = select(problem, name)
    return None if backend.again is None else backend.again(problem)


def worth_it(x: Tensor) -> bool:
    """Whether a backend on the device of x has an `again`."""
    return x.is_cuda or interpreted()


def may_fuse(device: torch.device, name: str = "auto") -> bool:
    """Whether kernels that take raw keys come into question at all, for tensors on `device`."""
    name = os.environ.get(ENVIRONMENT, "auto") if name == "auto" else name
    here = "cpu" if interpreted() else "cuda"
    return name in ("auto", "triton") and device.type == here and unavailable() is None


def why_unfused(problem: Problem, name: str = "auto") -> str | None:
    """Why the problem's features are not computed inside the kernels; None where they are."""
    name = os.environ.get(ENVIRONMENT, "auto") if name == "auto" else name
    if name not in ("auto", "triton"):
        return f"backend {name!r} takes mapped keys"
    return unavailable() or triton.why_unfused(problem) or explain(triton.BACKEND, problem)


def select(problem: Problem, name: str = "auto") -> Backend:
    """The backend called `name`, or for "auto" the one of FASTWEIGHTS_BACKEND, or the first that takes the problem.

    A backend that was asked for by name is never replaced by another: if it cannot run the problem, that is an error.
    """
    if name == "auto":
        name = os.environ.get(ENVIRONMENT, "auto")
    if name != "auto":
        backend = look_up({**BACKENDS, "auto": None}, name, "backend")
        assert backend is not None
        if reason := explain(backend, problem):
            others = [other.name for other in BACKENDS.values() if not explain(other, problem)]
            raise ValueError(f"backend {name!r} cannot run this call: {reason}; these can: {', '.join(others)}")
        return backend
    # One step is one step: a kernel takes it in one launch, and next to that the loop has the least to set up.
    order = ("triton", "reference") if problem.q.shape[1] == 1 else BACKENDS
    return next(BACKENDS[name] for name in order if not explain(BACKENDS[name], problem))


def explain(backend: Backend, problem: Problem) -> str | None:
    """Why `backend` cannot run `problem`; None where it can."""
    return backend.unavailable() or backend.refuses(problem)
