"""The backends, fastest first. To add one: a module with a `BACKEND` and its line here, or `register_backend`."""

import os

from fastweights.common.tables import look_up
from fastweights.ops.backends import chunked, reference
from fastweights.ops.cpu import backend as cpu
from fastweights.ops.features import PLAIN
from fastweights.ops.gpu import memory as triton
from fastweights.ops.spec import Backend, Executable, Refusal, Spec

BACKENDS: dict[str, Backend] = {module.BACKEND.name: module.BACKEND for module in (triton, cpu, chunked, reference)}

ENVIRONMENT = "FASTWEIGHTS_BACKEND"

# What runs calls of a spec on a backend, once both were found to fit; `fast_weight_memory` fills it.
EXECUTABLES: dict[tuple[Spec, str], Executable] = {}


def list_backends() -> dict[str, str]:
    """Return name and one-line description of every backend, in the order in which "auto" tries them."""
    return {name: backend.description for name, backend in BACKENDS.items()}


def register_backend(backend: Backend, before: str = "reference") -> None:
    """Enter a backend, which "auto" then tries before the one called `before`."""
    look_up(BACKENDS, before, "backend")
    if backend.name in BACKENDS:
        raise ValueError(f"there is a backend {backend.name!r} already; choose another name")
    rest = {name: BACKENDS.pop(name) for name in list(BACKENDS)[list(BACKENDS).index(before) :]}
    BACKENDS.update({backend.name: backend, **rest})
    # "auto" may choose otherwise from now on.
    EXECUTABLES.clear()


def requested(name: str) -> str:
    """Return the backend that a call asks for: `name`, or for "auto" the one of FASTWEIGHTS_BACKEND."""
    return os.environ.get(ENVIRONMENT, "auto") if name == "auto" else name


def prepare(spec: Spec, name: str = "auto") -> Executable:
    """Return what runs calls of this spec on the backend called `name`, or for "auto" on the first that takes them."""
    if spec.features != PLAIN and (spec.mask or spec.starts):
        # A gate that is still a logit can be held neither open nor shut, and a key that is 0 is not 0 after the map.
        mapped = prepare(spec.mapped(), name)
        return lambda inputs: mapped(inputs.masked().mapped())
    # torch.func and forward-mode differentiation go through plain PyTorch only.
    run = choose(spec, "reference" if spec.transformed else name)[1]
    return run if spec.mask is None else lambda inputs: run(inputs.masked())


def choose(spec: Spec, name: str = "auto") -> tuple[Backend, Executable]:
    """Return the backend called `name`, or for "auto" the first that takes calls of this spec, and what runs them.

    A backend that was asked for by name is never replaced by another: if it cannot run the call, that is an error.
    """
    name = requested(name)
    if name != "auto":
        backend = look_up({**BACKENDS, "auto": None}, name, "backend")
        assert backend is not None
        answer = _ask(backend, spec)
        if isinstance(answer, Refusal):
            others = [other.name for other in BACKENDS.values() if not isinstance(_ask(other, spec), Refusal)]
            raise ValueError(f"backend {name!r} cannot run this call: {answer.reason}; these can: {', '.join(others)}")
        return backend, answer
    for backend in BACKENDS.values():
        # One step is one step: a kernel takes it in one launch, and next to that the loop has the least to set up.
        if spec.T > 1 or backend.single_tokens(spec):
            answer = _ask(backend, spec)
            if not isinstance(answer, Refusal):
                return backend, answer
    raise AssertionError("the reference runs every call")


def _ask(backend: Backend, spec: Spec) -> Executable | Refusal:
    reason = backend.unavailable()
    return backend.prepare(spec) if reason is None else Refusal(reason)
