"""How a function is called: by the names that fla, transformers or this package have for the same arguments.

The signature to write a function of one's own for is fla's:

    function(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None)

with q, k (B, T, H, K), v (B, T, HV, V), g the natural logarithm of the decay, (B, T, HV) or (B, T, HV, K), beta
(B, T, HV), states (N, HV, K, V), and cu_seqlens (N + 1,) for sequences packed along T with B = 1. It returns o
(B, T, HV, V) and the final state, or o alone. What it does not take it may leave out.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.conformance.problem import Found, Function, Problem, Recurrence
from fastweights.ops.state import FastWeightState


class NotTaken(Exception):
    """A function has no argument for something that a call needs."""


# What a tensor of a problem is called; "scale" is K^-0.5 and "wants_state" whether to return the final state.
_COMMON = {**{name: name for name in ("q", "k", "v", "beta", "mask")}, "bounds": "cu_seqlens"}
_FLA = {**_COMMON, "g": "g", "state": "initial_state", "scale": "scale", "wants_state": "output_final_state"}
NAMES = {
    "fla": _FLA,
    "fastweights": {**_COMMON, "g": "log_decay", "state": "state", "rule": "rule"},
    "transformers": {**_FLA, "q": "query", "k": "key", "v": "value"},
}


def load(target: str) -> Callable[..., Any]:
    """Return the function that MODULE:FUNCTION names."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"name a function as MODULE:FUNCTION, such as fla.ops.kda:chunk_kda, got {target!r}")
    function = getattr(import_module(module), name, None)
    if not callable(function):
        near = [one for one, x in vars(import_module(module)).items() if callable(x) and not one.startswith("_")]
        raise ValueError(f"module {module} has no function {name!r}; it has {', '.join(sorted(near)) or 'none'}")
    return function


def convention_of(function: Callable[..., Any], given: str | None) -> str:
    """Return the convention that was given, or else the one that the names of the arguments are of."""
    if given is not None:
        look_up(NAMES, given, "convention")
        return given
    parameters = inspect.signature(function).parameters
    if "query" in parameters:
        return "transformers"
    return "fastweights" if "rule" in parameters else "fla"


def adapt(
    function: Callable[..., Any], convention: str, recurrence: Recurrence, options: Mapping[str, Any]
) -> Function:
    """Return the function with the arguments of this bench; `options` are given to it at every call."""
    names, parameters = dict(NAMES[convention]), inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if recurrence.decays == "key" and "gk" in parameters:
        names["g"] = "gk"

    def run(problem: Problem, wants_state: bool) -> Found:
        given: dict[str, Any] = {**problem.inputs, "bounds": problem.bounds, "mask": problem.mask}
        scale = problem.q.shape[-1] ** -0.5
        if names["g"] in parameters and parameters[names["g"]].default is inspect.Parameter.empty:
            # It cannot do without: e^0 is no decay.
            given.setdefault("g", problem.v.new_zeros(problem.v.shape[:3]))
        if convention == "fastweights":
            given |= {"q": problem.q * scale, "rule": recurrence.rule}
            given["state"] = None if problem.state is None else FastWeightState(problem.state)
        elif "scale" in parameters:
            given["scale"] = scale
        if wants_state and "wants_state" in names:
            given["wants_state"] = True
        call = {names[what]: x for what, x in given.items() if x is not None}
        for name in call:
            # A name that fla knows may be one of **kwargs; no other library has a mask.
            if name not in parameters and (name == "mask" or not open_ended):
                raise NotTaken(f"there is no argument {name}")
        result = function(**call, **options)
        o, state = (result, None) if isinstance(result, Tensor) else result[:2]
        state = state.W if isinstance(state, FastWeightState) else state
        if wants_state and state is None:
            raise NotTaken("it returns no final state")
        return o, state

    return run
