"""Run the cases on a function and compare what it gives with the oracle."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastweights.conformance.adapters import NotTaken
from fastweights.conformance.cases import CASES, Case
from fastweights.conformance.oracle import Results, errors, oracle, tolerances
from fastweights.conformance.problem import HEAD_SIZE, Function, Problem, Recurrence
from fastweights.conformance.ways import plainly

# Within the tolerance; beyond it, though by less than a hundred times and less than one per cent; further off; raised
# something that is no refusal; has no argument for it or refuses it; cannot be run on this machine.
VERDICTS = ("right", "inexact", "wrong", "error", "not supported", "skipped")
RIGHT, INEXACT, WRONG, ERROR, UNSUPPORTED, SKIPPED = VERDICTS
# What a function raises to say that it does not do something, apart from failing at it.
REFUSALS = (NotTaken, NotImplementedError, ValueError, TypeError, AssertionError)


@dataclass
class Row:
    """What was found in one case: `errors` and `tolerances` by result (o, state, dq, ...)."""

    case: str
    verdict: str
    errors: dict[str, float] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def worst(self) -> str | None:
        """The result that is furthest beyond, or nearest to, its tolerance."""
        return max(self.errors, key=lambda name: self.errors[name] / self.tolerances[name], default=None)

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON, which has no infinity."""
        found = {name: x if x < float("inf") else "inf" for name, x in self.errors.items()}
        return {**asdict(self), "errors": found}


@dataclass
class Bench:
    """The cases for one recurrence, with the oracle's answers, which it works out once for all functions."""

    recurrence: Recurrence
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    head_size: int = HEAD_SIZE
    _known: dict[Case, tuple[Results, dict[str, float]]] = field(default_factory=dict, init=False)

    def judge(self, function: Function, cases: Sequence[Case] = CASES) -> Iterator[Row]:
        """Yield the verdict on each case."""
        for case in cases:
            if reason := case.not_applicable(self.recurrence):
                yield Row(case.name, UNSUPPORTED, note=reason)
            elif reason := case.skipped(self.device):
                yield Row(case.name, SKIPPED, note=reason)
            else:
                yield self._judge(case, function)

    def _judge(self, case: Case, function: Function) -> Row:
        problem, notes = self._problem(case), list[str]()
        try:
            found = _results(case, function, problem, notes)
            if problem.q.is_cuda:
                # What goes wrong in a kernel is known when it has run.
                torch.cuda.synchronize(problem.q.device)
        except REFUSALS as refusal:
            return Row(case.name, UNSUPPORTED, note=_sentence(refusal))
        except Exception as failure:
            # Whatever a function of others raises is a finding of this bench.
            return Row(case.name, ERROR, note=f"{type(failure).__name__}: {_sentence(failure)}")
        if not found:
            return Row(case.name, UNSUPPORTED, note="; ".join(notes))
        before = self._problem(case).inputs
        if changed := [name for name, x in problem.inputs.items() if not torch.equal(x, before[name])]:
            return Row(case.name, WRONG, note=f"it overwrites its input {', '.join(changed)}")
        exact, allowed = self._answers(case)
        for name, x in found.items():
            if x.shape != exact[name].shape:
                shapes = f"{tuple(x.shape)} and not {tuple(exact[name].shape)}"
                return Row(case.name, WRONG, note=f"{name} has shape {shapes}")
        off = errors(found, exact)
        verdict = max((_verdict(error, allowed[name]) for name, error in off.items()), key=VERDICTS.index)
        return Row(case.name, verdict, off, {name: allowed[name] for name in off}, "; ".join(notes))

    def _problem(self, case: Case) -> Problem:
        return case.setting.draw(self.recurrence, self.dtype, self.device, self.seed, self.head_size)

    def _answers(self, case: Case) -> tuple[Results, dict[str, float]]:
        """Return the exact results of a case, and the error that is allowed for each."""
        if case not in self._known:
            problem, function = self._problem(case), oracle(self.recurrence)

            def solve(problem: Problem) -> Results:
                return _results(replace(case, way=plainly), function, problem, [])

            exact = solve(problem.mapped(Tensor.double))
            self._known[case] = exact, tolerances(solve, problem, exact)
        return self._known[case]


def passed(rows: Sequence[Row]) -> bool:
    """Return whether something was right, and nothing inexact, wrong or an error."""
    verdicts = {row.verdict for row in rows}
    return RIGHT in verdicts and not verdicts & {INEXACT, WRONG, ERROR}


def _verdict(error: float, allowed: float) -> str:
    if error <= allowed:
        return RIGHT
    return INEXACT if error <= min(100 * allowed, 0.01) else WRONG


def _results(case: Case, function: Function, problem: Problem, notes: list[str]) -> Results:
    """Return outputs and gradients of one call; a function without gradients leaves a note."""
    wanted = [name for name in case.gradients if name in problem.inputs]
    leaves = problem.mapped(lambda x: x.detach().requires_grad_()) if wanted else problem
    o, state = case.way(function, leaves, case.wants_state, notes)
    outputs = {"o": o} if state is None else {"o": o, "state": state}
    found = {name: outputs[name].detach() for name in case.outputs}
    if not wanted:
        return found
    through = outputs[case.through]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(through.shape, generator=generator, dtype=torch.float64).to(through)
    try:
        if not through.requires_grad:
            raise NotImplementedError(f"{case.through} has none")
        inputs = [leaves.inputs[name] for name in wanted]
        gradients = torch.autograd.grad(through, inputs, weights, allow_unused=True)
    except REFUSALS as refusal:
        notes.append(f"no gradients: {_sentence(refusal)}")
        return found
    for name, x, gradient in zip(wanted, inputs, gradients, strict=True):
        found[f"d{name}"] = torch.zeros_like(x) if gradient is None else gradient
    return found


def _sentence(error: BaseException) -> str:
    """Return the first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 160 else lines[0][:159] + "…"
