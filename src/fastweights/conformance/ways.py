"""Ways to call a function that must all give what one plain call gives: in parts, row by row, beside NaN."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fastweights.conformance.oracle import Function
from fastweights.conformance.problem import Problem

# Takes a function and a list for remarks.
Way = Callable[[Function, list[str]], Function]


def plainly(function: Function, notes: list[str]) -> Function:
    """Call it once."""
    return function


def in_parts(*cuts: int) -> Way:
    """Call it for each part of the time, from the state that the part before has left; no cuts: token by token."""

    def way(function: Function, notes: list[str]) -> Function:
        def run(problem: Problem, wants_state: bool) -> tuple[Tensor, Tensor | None]:
            T, state, outputs = problem.q.shape[1], problem.state, []
            for start, end in pairwise([0, *(cuts or range(1, T)), T]):
                o, state = function(replace(problem.tokens(start, end), state=state), True)
                outputs.append(o)
            return torch.cat(outputs, 1), state

        return run

    return way


def row_by_row(function: Function, notes: list[str]) -> Function:
    """Call it for the batch and for each row of it alone, and give what the rows gave."""

    def run(problem: Problem, wants_state: bool) -> tuple[Tensor, Tensor | None]:
        rows = [function(problem.rows(slice(i, i + 1)), False)[0] for i in range(problem.q.shape[0])]
        alone = torch.cat(rows)
        with torch.no_grad():
            together = function(problem, False)[0]
        notes.append("bit for bit" if torch.equal(alone, together) else "not bit for bit")
        return alone, None

    return run


def poisoned(function: Function, notes: list[str]) -> Function:
    """Call it while every `torch.empty` comes filled with NaN, so that memory nobody writes shows."""

    def run(problem: Problem, wants_state: bool) -> tuple[Tensor, Tensor | None]:
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")
        try:
            return function(problem, wants_state)
        finally:
            torch.set_deterministic_debug_mode(mode)

    return run


def beside_nan(function: Function, notes: list[str]) -> Function:
    """Call it with one row more, or one packed sequence more, that is all NaN, and leave that out of what it gives."""

    def run(problem: Problem, wants_state: bool) -> tuple[Tensor, Tensor | None]:
        packed = problem.bounds is not None
        sick = problem.tokens(0, 4) if packed else problem.rows(slice(0, 1))
        both = {}
        for name, x in problem.inputs.items():
            # A state has one row a sequence, whichever way these are put together.
            like = x[:1] if name == "state" else getattr(sick, name)
            nan = torch.full_like(like.detach(), float("nan"))
            both[name] = torch.cat([nan, x], 1 if packed and name != "state" else 0)
        bounds = None if problem.bounds is None else torch.cat([problem.bounds[:1], problem.bounds + 4])
        o, state = function(replace(problem, **both, bounds=bounds), wants_state)
        return o[:, 4:] if packed else o[1:], None if state is None else state[1:]

    return run


def as_first_and_last_of(B: int) -> Way:
    """Call it with B rows, of which the first and the last are those of the problem."""

    def way(function: Function, notes: list[str]) -> Function:
        def run(problem: Problem, wants_state: bool) -> tuple[Tensor, Tensor | None]:
            index = torch.zeros(B, dtype=torch.long, device=problem.q.device)
            index[-1] = 1
            o, state = function(problem.rows(index), wants_state)
            ends = torch.tensor([0, B - 1], device=o.device)
            return o[ends], None if state is None else state[ends]

        return run

    return way
