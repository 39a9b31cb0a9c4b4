"""The rivals that `bench kernels` times: which of them take a row, and how they are called and measured."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastweights.benchmarks.kernels.rows import DTYPES, Row, errors, inputs_of, memory
from fastweights.benchmarks.timing import measure

RIVALS = ("sdpa", "chunked", "fla", "flashqla")


@dataclass(frozen=True)
class Rival:
    """Another way to compute a row: somebody else's, or one of ours that is not a kernel.

    Attributes:
        name: for the table.
        function: of q, k, v and gates.
        environment: variables that are set while it runs.
        processes: that compile for it ahead of the measurement; 0 for what runs in the process of the benchmark.
        rounds_beta: whether it is given beta in the dtype of q.
        computes_the_row: whether its result is that of the row, and can be compared with float64.
    """

    name: str
    function: Callable[..., Tensor]
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 0
    rounds_beta: bool = False
    computes_the_row: bool = True

    def leaves(self, row: Row, dtype: str) -> list[Tensor]:
        """Return q, k, v and gates as it takes them."""
        leaves = inputs_of(row, DTYPES[dtype])
        if self.rounds_beta and "beta" in row.gates:
            leaves[3] = leaves[3].detach().to(leaves[0].dtype).requires_grad_()
        return leaves


# Modules and functions of fla by rule and whether decays are per key channel. A recurrent one walks token by token.
FLA: dict[tuple[str, bool], tuple[str, dict[str, str]]] = {
    ("delta", False): (
        "fla.ops.delta_rule",
        {"fla chunk": "chunk_delta_rule", "fla recurrent": "fused_recurrent_delta_rule"},
    ),
    ("gated_delta", False): ("fla.ops.gated_delta_rule", {"fla chunk": "chunk_gated_delta_rule"}),
    ("gated_delta", True): ("fla.ops.kda", {"fla chunk": "chunk_kda"}),
    ("decay", False): (
        "fla.ops.simple_gla",
        {"fla chunk": "chunk_simple_gla", "fla fused chunk": "fused_chunk_simple_gla"},
    ),
    ("decay", True): ("fla.ops.gla", {"fla chunk": "chunk_gla"}),
}
# So many configurations of fla's kernels are compiled that one process would take minutes.
COMPILING = {"chunk_kda": 4, "chunk_gla": 5, "chunk_simple_gla": 3, "chunk_delta_rule": 2, "chunk_gated_delta_rule": 2}
# Where there is FlashQLA or TileLang, fla calls them: FlashQLA is a rival of its own here.
OWN_KERNELS = {"FLA_FLASH_QLA": "0"}
ONLY_TRITON = {"FLA_TILELANG": "0"}


def ours(row: Row) -> Rival:
    """Return the kernels of this package, with the arguments of a rival."""
    return Rival("fastweights", memory(row, "triton"), processes=1)


def rivals_of(row: Row, dtype: str, which: tuple[str, ...]) -> Iterator[Rival]:
    """Yield those of `which` that take a row."""
    _, T, _, D, M = row.shape
    if "chunked" in which:
        yield Rival("chunked", memory(row, "chunked"))
        if T < 2048:
            # Compiled it takes as long to compile as there are chunks.
            yield Rival("chunked, compiled", _compiled(memory(row, "chunked")))
    if "sdpa" in which and dtype != "float32":
        yield Rival("sdpa", _attention, computes_the_row=False)
    if "fla" in which and has("fla"):
        yield from _fla(row, dtype)
    only = ("gated_delta", False, 128, 128, "bfloat16")
    if "flashqla" in which and has("flash_qla") and (row.rule, row.per_key, D, M, dtype) == only:
        function = _called(row, "flash_qla", "chunk_gated_delta_rule", auto_cp=True)
        yield Rival("flashqla", function, processes=2, rounds_beta=True)


def _fla(row: Row, dtype: str) -> Iterator[Rival]:
    """Yield fla's functions for a row."""
    module, functions = FLA[row.rule, row.per_key]
    _, T, _, D, M = row.shape
    # It reads past its arrays where D and M differ.
    if row.rule == "delta" and D != M:
        return
    for name, function in functions.items():
        recurrent = "recurrent" in function
        if (T > 2048) if recurrent else (row.rule == "delta" and dtype == "float32"):
            continue
        call, processes = _called(row, module, function), COMPILING.get(function, 1)
        if function == "chunk_kda" and has("tilelang"):
            yield Rival(f"{name}, only Triton", call, OWN_KERNELS | ONLY_TRITON, processes, rounds_beta=True)
            # What it has beyond that is one kernel.
            processes = 1
        yield Rival(name, call, OWN_KERNELS, processes, rounds_beta=True)


def has(package: str) -> bool:
    """Tell whether there is a package to compare with."""
    return find_spec(package) is not None


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile for these sizes alone: once others were compiled, `torch.compile` would treat sizes as variables."""
    made: list[Callable[..., Tensor]] = []

    def run(*leaves: Tensor) -> Tensor:
        if not made:
            torch.compiler.reset()
            made.append(torch.compile(function, dynamic=False))
        return made[0](*leaves)

    return run


def _called(row: Row, module: str, name: str, **options: Any) -> Callable[..., Tensor]:
    """Return a function of another library, with the names that fla has for gates."""
    names = ["g" if gate == "log_decay" else gate for gate in row.gates]

    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        named = dict(zip(names, gates, strict=True))
        y: Tensor = getattr(import_module(module), name)(q=q, k=k, v=v, **named, scale=1.0, **options)[0]
        return y

    return run


def _attention(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Compute causal softmax attention."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention_inputs(row: Row, dtype: torch.dtype) -> list[Tensor]:
    """Return inputs with heads of D, in the layout that suits attention."""
    B, T, H, D, _ = row.shape
    return [torch.randn(B, H, T, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def judge_and_time(row: Row, dtype: str, rival: Rival, budget_ms: float) -> dict[str, Any]:
    """Return the errors against float64 and, after that, the times."""
    with environment(rival.environment):
        found = errors(row, rival.function, rival.leaves(row, dtype)) if rival.computes_the_row else {}
        leaves = rival.leaves(row, dtype) if rival.computes_the_row else _attention_inputs(row, DTYPES[dtype])
        return measure(lambda: rival.function(*leaves), leaves, budget_ms) | found


def named(row: Row, dtype: str, name: str) -> Rival:
    """Return the rival of that name for a row."""
    return next(rival for rival in (ours(row), *rivals_of(row, dtype, RIVALS)) if rival.name == name)


def measure_rival(row: Row, dtype: str, name: str, budget_ms: float) -> dict[str, Any]:
    """Judge and time the rival of that name: what a separate process is asked for."""
    try:
        return judge_and_time(row, dtype, named(row, dtype, name), budget_ms)
    finally:
        torch.cuda.empty_cache()
