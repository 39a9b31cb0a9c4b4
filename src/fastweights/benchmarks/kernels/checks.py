"""The checks of `bench kernels` before anything is timed: is every configuration right on this GPU?"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fastweights as fw
from fastweights.benchmarks.timing import in_one_line
from fastweights.common.cuda_graph import capture_after_warmup
from fastweights.common.separate import SeparateProcess, side_by_side
from fastweights.ops import family
from fastweights.ops.gpu.memory.self_check import check_of, shipped
from fastweights.ops.gpu.memory.signatures import Signature, WalkSignature
from fastweights.ops.gpu.memory.variants import RecurrentWalk, plain_rows
from fastweights.ops.gpu.self_check import LIMITS, relative_errors
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs, Spec

HEADS = 2


def every_kind() -> Iterator[Signature]:
    """Yield what is shipped (groups, packed sequences, maps, steps too), then each row of the table with each rule."""
    x = torch.zeros(1, 2, 1, 1)
    seen = set()
    for dtype, D, M, config in plain_rows():
        for rule in RULES.values() if dtype in LIMITS else ():
            if rule.coefficients is not None:
                gates = dict.fromkeys(rule.gate_names, x[..., 0])
                (part,) = family.parts(Spec.of(Inputs(rule, x, x, x, gates, x)))
                if not (part.decay and isinstance(config, RecurrentWalk)):
                    seen.add(WalkSignature(dtype, D, M, *part[2:], False, config))
    kinds = list(shipped())
    yield from kinds
    yield from (kind for kind in sorted(seen, key=str) if kind not in kinds)


def check_kinds(kinds: Sequence[Signature], workers: int) -> dict[str, dict[str, Any]]:
    """Return each kind's errors against float64 and whether it is right, by `workers` processes that compile at once.

    A kind that takes the context of the GPU down takes its process with it, and nothing else.
    """
    processes = [SeparateProcess(_checking) for _ in range(min(workers, len(kinds)))]
    return {
        kind.key: {"right": False, "failure": in_one_line(found)} if isinstance(found, Exception) else found
        for kind, found in side_by_side(processes, kinds, limit_s=None)
    }


def _checking() -> Callable[[Signature], dict[str, Any]]:
    return _check


def _check(kind: Signature) -> dict[str, Any]:
    check = check_of(kind, HEADS)
    verdict = check.run(torch.device("cuda", 0))
    return {"right": check.reason(verdict) is None, "errors": verdict.errors, "failure": verdict.failure}


def layer_in_a_graph(**options: Any) -> dict[str, Any]:
    """Compare a whole layer in bfloat16, forward and backward, from a CUDA graph with new inputs and eager."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    layer = fw.FastWeightAttention(128, 8, 16, **options).to("cuda", dtype)
    x = torch.randn(4, 100, 128, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    wanted = [x, *layer.parameters()]

    outputs: list[Tensor] = []

    def step() -> None:
        y, state = layer(x)
        outputs[:] = [y, state.W, *torch.autograd.grad(y, wanted, dy)]

    replay = capture_after_warmup(step, x.device)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        dy.copy_(torch.randn_like(dy))
    replay()
    torch.cuda.synchronize()
    replayed = [output.clone() for output in outputs]
    step()
    worst = max(relative_errors(map(str, range(len(outputs))), replayed, outputs).values())
    equal = all(torch.equal(a, b) for a, b in zip(replayed, outputs, strict=True))
    return {"right": worst < 1e-2, "equal": equal, "worst": worst}
