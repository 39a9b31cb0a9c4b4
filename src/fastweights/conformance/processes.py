"""Judge cases in other processes, so that one that crashes, hangs or ruins the GPU's context ends nothing else."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastweights.common.separate import SeparateProcess, StartFailed, side_by_side
from fastweights.conformance.adapters import adapt, load
from fastweights.conformance.cases import CASES, Case
from fastweights.conformance.judge import ERROR, Bench, Row


def judge_in_processes(
    bench: Bench,
    target: str,
    convention: str,
    options: Mapping[str, Any],
    cases: Sequence[Case],
    processes: int,
    limit_s: float,
    configurations: int | None = None,
) -> Iterator[Row]:
    """Yield the verdict on each case as it is found, by that many processes; none may take longer than the limit.

    Cases that need other kernels than those before them come first, so that processes do not compile the same at once.

    Args:
        target, convention, options: as in `load` and `adapt`.
        configurations: as in `tune_over`.
    """
    arguments = (bench, target, convention, options, configurations)
    workers = [SeparateProcess(_judge, *arguments) for _ in range(min(processes, len(cases)))]
    # Cases hold functions, which cannot be sent: their numbers are.
    numbers = [CASES.index(case) for case in _spread(cases)]
    for number, found in side_by_side(workers, numbers, limit_s, can_continue=lambda found: found[1]):
        if isinstance(found, StartFailed):
            raise found
        yield Row(CASES[number].name, ERROR, note=str(found)) if isinstance(found, Exception) else found[0]


def _spread(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with the first of each kind first, then the second of each kind, and so on."""
    seen, ranks = Counter[Any](), dict[str, int]()
    for case in cases:
        at = case.setting
        kind = (at.H, at.HV, at.K, at.V, at.state, at.lengths is None, case.wants_state, bool(case.gradients))
        ranks[case.name] = seen[kind]
        seen[kind] += 1
    return sorted(cases, key=lambda case: ranks[case.name])


def _judge(
    bench: Bench, target: str, convention: str, options: Mapping[str, Any], configurations: int | None
) -> Callable[[int], tuple[Row, bool]]:
    """Return a function that judges the case of a number, and says whether the device can still be used."""
    sys.path.insert(0, "")
    if configurations is not None:
        tune_over(configurations)
    function = adapt(load(target), convention, bench.recurrence, options)

    def judge(number: int) -> tuple[Row, bool]:
        case = CASES[number]
        try:
            (row,) = bench.judge(function, [case])
        except Exception as failure:
            # What a kernel did to the GPU's context may show only later, in what is ours.
            row = Row(case.name, ERROR, note=f"{type(failure).__name__}: {str(failure).splitlines()[0][:160]}")
        return row, _is_usable(bench.device)

    return judge


def _is_usable(device: str) -> bool:
    """Return whether the device still computes."""
    try:
        return bool((torch.ones(1, device=device) + 1).item() == 2)
    except RuntimeError:
        return False


def tune_over(configurations: int) -> None:
    """Let Triton's autotuner in this process choose among this many configurations of a kernel, evenly spaced."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs
    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)

    def some(self: Any, *arguments: Any) -> Any:
        configs = every(self, *arguments)
        return configs[:: -(-len(configs) // configurations)]

    Autotuner.prune_configs = some
