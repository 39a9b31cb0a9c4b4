"""The rivals that `bench kernels` times, and a separate process for those that may take the GPU down."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import fastweights as fw
from fastweights.benchmarks.timing import Forward, in_one_line, measure

Shape = tuple[int, int, int, int, int]

RIVALS = ("sdpa", "chunked", "fla")
SEED = 0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# The time limit of a measurement in a separate process, tuning included.
LIMIT_S = 90.0


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, keys of length 1, v, and beta in float32."""
    B, T, H, D, M = shape
    generator = torch.Generator("cuda").manual_seed(SEED)
    q, k, v = (torch.randn(B, T, H, n, device="cuda", generator=generator) for n in (D, D, M))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(B, T, H, device="cuda", generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta


def delta_rule(backend: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Run the delta rule with that backend of the library."""
    return fw.fast_weight_memory(q, k, v, beta=beta, backend=backend)[0]


def make_rivals(
    shape: Shape, dtype: str, which: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], tuple[Forward, Any]]]]:
    """Yield the name of each rival that takes the shape, and a function that makes its forward pass and leaves."""
    _, T, _, D, M = shape

    def on(function: Callable[..., Tensor], cast_gate: bool = False) -> Callable[[], tuple[Forward, Any]]:
        def make() -> tuple[Forward, Any]:
            q, k, v, beta = inputs(shape, DTYPES[dtype])
            leaves = [x.requires_grad_() for x in (q, k, v, beta.to(q.dtype) if cast_gate else beta)]
            return lambda: function(*leaves), leaves

        return make

    yield "fastweights", on(partial(delta_rule, "triton"))
    if "chunked" in which:
        yield "chunked", on(partial(delta_rule, "chunked"))
        if T < 2048:
            # Compiled it takes as long to compile as there are chunks.
            yield "chunked, compiled", lambda: on(_compiled(lambda *x: delta_rule("chunked", *x)))()
    if "sdpa" in which and dtype != "float32":
        yield "sdpa", lambda: _attention(shape, DTYPES[dtype])
    # fla reads past its arrays where D and M differ.
    if "fla" in which and has_fla() and D == M:
        if dtype != "float32":
            yield "fla chunk", on(_fla("chunk_delta_rule"), cast_gate=True)
        if T <= 2048:
            yield "fla recurrent", on(_fla("fused_recurrent_delta_rule"), cast_gate=True)


def has_fla() -> bool:
    """Tell whether there is fla to compare with."""
    return find_spec("fla") is not None


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile for these sizes alone, as if no others had been compiled before: else they would become variables."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def _fla(name: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        import fla.ops.delta_rule

        y: Tensor = getattr(fla.ops.delta_rule, name)(q, k, v, beta, scale=1.0)[0]
        return y

    return run


def _attention(shape: Shape, dtype: torch.dtype) -> tuple[Forward, Any]:
    """Make causal softmax attention with heads of D, in the layout that suits it."""
    B, T, H, D, _ = shape
    q, k, v = (torch.randn(B, H, T, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)


def measure_rival(shape: Shape, dtype: str, name: str, budget_ms: float) -> dict[str, Any]:
    """Time the rival of that name: what a separate process is asked for."""
    try:
        return measure(dict(make_rivals(shape, dtype, RIVALS))[name], budget_ms)
    finally:
        torch.cuda.empty_cache()


class SeparateProcess:
    """A process for what may crash the GPU's context or never end; a new one after each failure."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self.pool: ProcessPoolExecutor | None = None

    def begin(self, function: Callable[..., dict[str, Any]] = dict, *arguments: Any) -> Future[dict[str, Any]]:
        """Start a call there without waiting for it; the first one also starts the process and loads torch."""
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        return self.pool.submit(_run_with_new_tuning, function, arguments)

    def __call__(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Return what `function` returns there, or {"failure": why not}."""
        try:
            return self.begin(function, *arguments).result(self.limit_s)
        except Exception as error:
            self.close()
            return {"failure": in_one_line(error)}

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self.pool is not None:
            for process in list((self.pool._processes or {}).values()):
                process.kill()
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None


def _run_with_new_tuning(function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Run in the separate process, where fla tunes itself for the sizes at hand: its cache would confuse them.

    Its keys have neither the batch nor the length of sequences. A configuration is judged by the median of 20 ms after
    5 of warming up, where Triton takes 100 after 25: that is what makes it a minute.
    """
    # Read when fla is imported.
    os.environ["FLA_CACHE_RESULTS"] = "0"
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    if not isinstance(triton.testing.do_bench, partial):
        triton.testing.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)
    for thing in gc.get_objects():
        # Not `isinstance`, which asks objects what they are: some of them are proxies of what is gone.
        if issubclass(type(thing), Autotuner):
            thing.cache.clear()
    return function(*arguments)
