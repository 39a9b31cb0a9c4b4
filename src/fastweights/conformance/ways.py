"""Ways to call a function that must all give what one plain call gives: in parts, row by row, beside NaN.

A way takes the function, a problem, whether the final state is wanted, and a list for remarks; it returns outputs and
final state as the function does. What else it takes is bound in the table of cases.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from fastweights.conformance.problem import Found, Function, Problem

Way = Callable[[Function, Problem, bool, list[str]], Found]


def plainly(function: Function, problem: Problem, wants_state: bool, notes: list[str]) -> Found:
    """Call it once."""
    return function(problem, wants_state)


def in_parts(
    function: Function, problem: Problem, wants_state: bool, notes: list[str], cuts: tuple[int, ...] = ()
) -> Found:
    """Call it for each part of the time, from the state that the part before has left; no cuts: token by token."""
    T, state, outputs = problem.q.shape[1], problem.state, []
    for start, end in pairwise([0, *(cuts or range(1, T)), T]):
        o, state = function(replace(problem.tokens(start, end), state=state), True)
        outputs.append(o)
    return torch.cat(outputs, 1), state


def row_by_row(function: Function, problem: Problem, wants_state: bool, notes: list[str]) -> Found:
    """Call it for the batch and for each row of it alone, and give what the rows gave."""
    rows = [function(problem.rows(slice(i, i + 1)), False)[0] for i in range(problem.q.shape[0])]
    alone = torch.cat(rows)
    with torch.no_grad():
        together = function(problem, False)[0]
    notes.append("bit for bit" if torch.equal(alone, together) else "not bit for bit")
    return alone, None


def poisoned(function: Function, problem: Problem, wants_state: bool, notes: list[str]) -> Found:
    """Call it while every `torch.empty` comes filled with NaN, so that memory nobody writes shows."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        return function(problem, wants_state)
    finally:
        torch.set_deterministic_debug_mode(mode)


def beside_nan(function: Function, problem: Problem, wants_state: bool, notes: list[str]) -> Found:
    """Call it with one row more, or one packed sequence more, that is all NaN, and leave that out of what it gives."""
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


def as_first_and_last_of(function: Function, problem: Problem, wants_state: bool, notes: list[str], B: int) -> Found:
    """Call it with B rows, of which the first and the last are those of the problem."""
    index = torch.zeros(B, dtype=torch.long, device=problem.q.device)
    index[-1] = 1
    o, state = function(problem.rows(index), wants_state)
    ends = torch.tensor([0, B - 1], device=o.device)
    return o[ends], None if state is None else state[ends]
