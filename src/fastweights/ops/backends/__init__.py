"""The backends, fastest first. To add one: a module with a `BACKEND` in this folder and its line in `BACKENDS`."""

from __future__ import annotations

import os

from fastweights.ops.backends import chunked, cpu, reference, triton
from fastweights.ops.backends.base import Backend
from fastweights.ops.problem import Problem
from fastweights.ops.tables import look_up

BACKENDS: dict[str, Backend] = {module.BACKEND.name: module.BACKEND for module in (triton, cpu, chunked, reference)}

ENVIRONMENT = "FASTWEIGHTS_BACKEND"


def list_backends() -> dict[str, str]:
    """Name and one-line description of every backend, in the order in which "auto" tries them."""
    return {name: backend.description for name, backend in BACKENDS.items()}


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
