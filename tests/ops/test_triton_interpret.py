"""The Triton kernels in Triton's interpreter, against the reference: outputs, states and every gradient.

`test_in_the_interpreter` runs them.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fastweights.ops import family, reference
from fastweights.ops.family import LOG_OF_ZERO
from fastweights.ops.gpu.memory import variants as configs
from fastweights.ops.gpu.memory.variants import (
    HALF,
    IEEE,
    TF32X3,
    RecurrentWalk,
    Variant,
    configuration,
    group_length,
)
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs, Spec
from tests.ops.calls import FAMILY
from tests.ops.interpreted import INTERPRETED, altered, as_fused, inside, poisoned, recurrence  # noqa: F401

pytest.importorskip("triton")


def a_problem(
    rule: str,
    B: int = 1,
    T: int = 33,
    H: int = 2,
    D: int = 12,
    M: int = 20,
    *,
    dtype: torch.dtype = torch.float64,
    normalized: bool = False,
    bounds: list[int] | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs; keys of length about 1, positive where they are divided by; every fifth decay shut.

    Of a `rule` that ends in "per key" decays are logarithms, one for each key channel.
    """
    rule, _, per_key = rule.partition(" ")
    g = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=g, dtype=dtype)
    q, k, v = draw(B, T, H, D), draw(B, T, H, D), draw(B, T, H, M)
    if normalized:
        q, k = q.abs() + 0.1, k.abs() + 0.1
    k = k / k.norm(dim=-1, keepdim=True)
    gates = {name: torch.rand(B, T, H, generator=g, dtype=dtype) for name in RULES[rule].gate_names}
    if "decay" in gates:
        gates["decay"][:, 4::5] = 0
    if per_key:
        gates.pop("decay")
        gates["log_decay"] = -8 * torch.rand(B, T, H, D, generator=g, dtype=dtype) ** 6
        # Only at first, since chunks without such decays have kernels of their own.
        gates["log_decay"][:, 4:12:5, :, ::3] = LOG_OF_ZERO
    N = B if bounds is None else len(bounds) - 1
    W = draw(N, H, D, M)
    z = draw(N, H, D).abs() if normalized else None
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return Inputs(RULES[rule], q, k, v, gates, W, z, cu_seqlens)


def run_both(problem: Inputs, kernels: Variant | None = None, tolerance: float | None = None) -> None:
    """Compare everything that comes out and everything that flows back."""
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.gates, "W": problem.W}
    if problem.z is not None:
        tensors["z"] = problem.z
    for x in tensors.values():
        x.requires_grad_()
    names = list(tensors)

    def everything(outputs: tuple[Tensor, Tensor, Tensor | None]) -> dict[str, Tensor]:
        y, W, z = outputs
        named = {"y": y, "W_end": W} | ({} if z is None else {"z_end": z})
        g = torch.Generator().manual_seed(1)
        loss = sum((x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in named.values())
        grads = torch.autograd.grad(loss, [tensors[name] for name in names])
        return named | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}

    logs = "log_decay" in problem.gates
    ours = everything(family.run(problem, partial(recurrence, config=kernels), logs=logs))
    expected = everything(reference.run(problem))
    if tolerance is None:
        tolerance = 1e-10 if problem.q.dtype == torch.float64 else 1e-5
    for name, want in expected.items():
        assert ours[name].dtype == want.dtype
        error = (ours[name] - want).norm() / want.norm().clamp_min(1e-3)
        assert error <= tolerance, f"{name} is off by {error:.1e}"


FUSED = as_fused(configuration(16, 16, torch.float64, 1, 1))
# Two programs a state, two tiles of features: what head sizes over 32 are made of.
SPLIT = replace(configuration(16, 16, torch.float64, 1, 1), columns=16, key_tile=16)
# Three stages, so that there is one that is neither written nor read.
TOKENS = RecurrentWalk(
    **{"chunk": 16, "precision": IEEE, "lanes": 2},
    **{"forward_warps": 4, "forward_stages": 3, "backward_warps": 4, "backward_stages": 3},
)


@inside
@pytest.mark.parametrize("kernels", [FUSED, SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize("rule", FAMILY)
def test_every_rule(rule, kernels):
    run_both(a_problem(rule, D=20, M=20), kernels)


PER_KEY = [f"{rule} per key" for rule in ("decay", "gated_delta", "comba")]


@inside
@pytest.mark.parametrize(("rule", "chunk", "steps"), [*((rule, 16, 1) for rule in PER_KEY), (PER_KEY[-1], 64, 2)])
def test_decays_per_key(rule, chunk, steps):
    """Also features in two tiles, of which the second is not full, and values in two programs."""
    run_both(a_problem(rule, T=70 if chunk == 64 else 40, H=1, D=20, M=20), replace(SPLIT, chunk=chunk, steps=steps))


@inside
def test_packed_decays_per_key():
    problem = a_problem("gated_delta per key", T=75, H=1, D=9, M=7, bounds=[0, 5, 5, 43, 75])
    run_both(problem, replace(SPLIT, chunk=64, steps=1, both_ways=True, prefetch=True))


@inside
@pytest.mark.parametrize("rule", PER_KEY)
def test_attention_normalization_with_decays_per_key(rule):
    run_both(a_problem(rule, T=19, H=1, D=8, M=5, normalized=True), SPLIT)


@inside
@pytest.mark.parametrize("log", [-1e-7, -5.0, -100.0, LOG_OF_ZERO])
def test_decays_per_key_from_all_to_nothing(log):
    """Every other channel, so that a product with another decay shows every digit that is lost."""
    problem = a_problem("gated_delta per key", T=35, H=1, D=8, M=8, dtype=torch.float32)
    problem.gates["log_decay"].fill_(-0.01)[..., ::2] = log
    run_both(problem, replace(SPLIT, chunk=32, precision=TF32X3, solve=TF32X3))


@inside
@pytest.mark.parametrize("rule", FAMILY)
def test_attention_normalization(rule):
    run_both(a_problem(rule, T=19, H=1, D=12, M=9, normalized=True))


@inside
@pytest.mark.parametrize("kernels", [FUSED, SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize("rule", FAMILY)
def test_tiles_loaded_both_ways(rule, kernels):
    """And chunks in batches, the last of which is not full. Heads start at multiples of eight, as it takes."""
    run_both(a_problem(rule, H=1, D=24, M=24), altered(kernels, both_ways=True, chunks_per_program=2))


@inside
@pytest.mark.parametrize(
    "rule", [name for name in FAMILY if not family.coefficients_there(Spec.of(a_problem(name)))[0]]
)
def test_token_by_token(rule):
    """Also heads that fill no tile, and rows that start at no multiple of anything."""
    run_both(a_problem(rule, B=2, T=37, D=20, M=20), TOKENS)
    run_both(a_problem(rule, T=18, D=13, M=7), TOKENS)


@inside
@pytest.mark.parametrize("T", [1, 7, 16, 47])
def test_token_by_token_of_any_length(T):
    run_both(a_problem("delta", T=T, H=1, D=16, M=8, dtype=torch.float32), replace(TOKENS, precision=TF32X3))


@inside
def test_token_by_token_with_gates_apart():
    """Attention normalisation erases with another gate than it writes with."""
    run_both(a_problem("delta", T=35, H=2, D=12, M=9, normalized=True), TOKENS)


@inside
def test_token_by_token_with_strides_that_take_64_bits(monkeypatch):
    """A few hundred of them pass 2³¹; the memory between tokens is never touched, and so never there."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    T, step = 140, 2**24 - 8
    problem = a_problem("delta", T=T, H=1, D=8, M=8, dtype=torch.float32)
    far = torch.empty(T * step).as_strided(problem.q.shape, (T * step, step, 8, 1))
    far.copy_(problem.q)
    run_both(replace(problem, q=far), replace(TOKENS, precision=TF32X3))


@inside
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_packed_token_by_token(rule):
    bounds = [0, 0, 1, 17, 33, 52, 70, 70]
    run_both(a_problem(rule, T=70, H=2, D=16, M=16, bounds=bounds), TOKENS)


PRODUCTS = [pytest.param(IEEE, torch.float64, id="ieee"), pytest.param(TF32X3, torch.float32, id="tf32x3")]


@inside
@pytest.mark.parametrize(("precision", "dtype"), PRODUCTS)
@pytest.mark.parametrize("kernels", [FUSED, SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize("rule", FAMILY)
def test_all_that_walks_read_copied_ahead(rule, kernels, precision, dtype):
    """Values by a product with the unit matrix, gate gradients from a diagonal; in float32, tiles for each operand."""
    ahead = replace(kernels, both_ways=True, prefetch=True, precision=precision, solve=precision)
    run_both(a_problem(rule, T=20, H=1, D=24, M=24, dtype=dtype), ahead)


@inside
@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("M", [8, 40])
def test_values_copied_ahead_whatever_is_wider(M, chunk):
    """The unit matrix stands on the side where it is smaller."""
    run_both(
        a_problem("delta", T=70, H=1, D=8, M=M), replace(FUSED, chunk=chunk, columns=64, both_ways=True, prefetch=True)
    )


@inside
@pytest.mark.parametrize("precision", [IEEE, TF32X3], ids=["ieee", "tf32x3"])
def test_packed_sequences_copied_ahead(precision):
    """Past the end of a sequence both loads of a tile read nothing."""
    problem = a_problem("gated_delta", T=53, H=2, D=16, M=16, bounds=[0, 1, 17, 17, 53], dtype=torch.float32)
    run_both(problem, replace(FUSED, both_ways=True, prefetch=True, precision=precision, solve=precision))


@inside
@pytest.mark.parametrize("T", [1, 7, 16, 47])
def test_lengths(T):
    run_both(a_problem("gated_delta", B=2, T=T, H=1, D=8, M=16, dtype=torch.float32))


@inside
@pytest.mark.parametrize(("D", "M"), [(8, 8), (12, 20), (40, 16), (16, 70)])
def test_shipped_configurations(D, M):
    run_both(a_problem("delta", T=40, H=1, D=D, M=M, dtype=torch.float32))


@inside
@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("kernels", [FUSED, SPLIT], ids=["fused", "split"])
def test_chunks(chunk, kernels):
    run_both(a_problem("gated_delta", T=70, H=1), replace(kernels, chunk=chunk))


@inside
@pytest.mark.parametrize("chunk", [16, 64])
def test_inverse_from_float16(chunk):
    """As shipped for bfloat16: three digits, and no more than these are wanted there."""
    run_both(a_problem("delta", T=70, H=1, dtype=torch.float32), replace(FUSED, chunk=chunk, solve=HALF), 2e-3)


@inside
@pytest.mark.parametrize(
    ("kernels", "H"),
    [(FUSED, 2), (SPLIT, 1), (replace(SPLIT, chunks_per_program=3), 2)],
    ids=["fused", "split", "batches"],
)
def test_packed_sequences(kernels, H):
    """Also empty ones at the ends, one of a single token, one that fills a chunk exactly, and 4 tokens in none."""
    run_both(a_problem("gated_delta", T=58, H=H, D=16, M=16, bounds=[0, 0, 1, 17, 36, 54, 54]), kernels)


@inside
@pytest.mark.parametrize(
    ("rule", "T", "B", "kernels"),
    [
        ("gated_delta", 66, 2, FUSED),
        ("delta", 64, 2, FUSED),
        ("gated_delta", 66, 2, SPLIT),
        ("delta", 66, 1, SPLIT),
        ("sum", 64, 1, SPLIT),
        ("gated_delta", 66, 2, replace(SPLIT, chunks_per_program=3)),
    ],
    ids=["gated-fused", "delta-fused", "gated-split", "delta-split", "sum-split", "gated-batches"],
)
def test_groups_of_chunks(monkeypatch, rule, T, B, kernels):
    """A long sequence cut into stretches that walk side by side; the last one shorter, and ending inside a chunk."""
    monkeypatch.setattr(configs, "LEAST_CHUNKS", 1)
    monkeypatch.setattr(configs, "LEAST_GROUPS", 2)
    assert group_length(T, None, replace(kernels, groups=2)) == {66: 48, 64: 32}[T]
    run_both(a_problem(rule, B=B, T=T, H=1, D=8, M=12), replace(kernels, groups=2))


@inside
@pytest.mark.parametrize(("T", "B"), [(66, 2), (64, 1)])
def test_groups_keep_what_whole_sequences_keep(monkeypatch, T, B):
    """The same states, inverses and errors, in the same slots: one for each chunk and no more."""
    from fastweights.ops.gpu.memory import grouped as walks

    monkeypatch.setattr(configs, "LEAST_CHUNKS", 1)
    monkeypatch.setattr(configs, "LEAST_GROUPS", 2)
    problem = a_problem("gated_delta", B=B, T=T, H=2, D=8, M=12)
    a, beta = problem.gates["decay"], problem.gates["beta"]
    tokens = (problem.q, problem.k, problem.v, a, beta, None)
    cut, whole = (
        walks.plan_walks(tokens, None, torch.float64, True, True, replace(SPLIT, groups=groups)).forward(
            tokens, problem.W, None, True
        )
        for groups in (2, 0)
    )
    assert len(cut) == 6 and len(whole) == 5
    assert len(cut[2]) == len(cut[3]) == B * -(-T // SPLIT.chunk)
    for ours, want in zip(cut[:5], whole[:5], strict=True):
        # Blocks of an inverse that nobody reads are not written.
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-10, equal_nan=True)


@inside
def test_a_group_is_worth_its_launches():
    config = replace(SPLIT, groups=64)
    assert group_length(448, None, config) == 0
    assert group_length(449, None, config) == 64
    assert group_length(10000, None, config) == 160
    assert group_length(10000, torch.tensor([0, 10000]), config) == 0


@inside
@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 43, 75]], ids=["one", "packed"])
@pytest.mark.parametrize("rule", ["delta", "gated_delta", "decay"])
def test_chunks_that_walks_take_in_steps(rule, bounds):
    """Also a sequence that ends in the first step of a chunk, and one that ends in the second."""
    run_both(a_problem(rule, T=75, H=1, bounds=bounds), replace(SPLIT, chunk=32, steps=2))


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernels", [FUSED, SPLIT], ids=["fused", "split"])
def test_decays_from_all_to_nothing(kernels, dtype):
    """A memory that is emptied, one that all but is, one that fades fast or hardly at all: no division, no infinity."""
    problem = a_problem("gated_delta", T=33, H=1, dtype=dtype)
    logarithms = torch.tensor([-1e-7, -100.0, -0.01, -5.0, float("-inf"), -0.1, -50.0, 0.0], dtype=torch.float64)
    problem.gates["decay"][:] = logarithms.exp()[torch.arange(33) % 8].reshape(1, 33, 1).to(dtype)
    precision = IEEE if dtype == torch.float64 else TF32X3
    run_both(problem, replace(kernels, precision=precision, solve=precision))


@inside
@pytest.mark.parametrize(("n", "fits"), [(2**31 - 1, True), (2**31, False)])
def test_integers_that_overflow_are_noticed(n, fits):
    import triton
    from triton.runtime.errors import InterpreterError

    @triton.jit
    def double(out, half, rest):
        triton.language.store(out, half * 2 + rest)

    out = torch.zeros((), dtype=torch.int32)
    with nullcontext() if fits else pytest.raises(InterpreterError, match="int32 overflows in"):
        double[(1,)](out, n // 2, n % 2)
    assert out.item() == n * fits


@inside
def test_every_key_the_same():
    """The inverse's entries stay small where powers of its matrix would not."""
    problem = a_problem("delta", T=64, H=1, D=8, M=8, dtype=torch.float32)
    problem.k[:] = problem.k[:, :1].clone()
    problem.gates["beta"].fill_(1.0)
    run_both(problem, replace(FUSED, chunk=64))


@inside
def test_a_decay_of_any_sign():
    problem = a_problem("decay", T=40)
    problem.gates["decay"].sub_(0.5).mul_(2)
    run_both(problem, SPLIT)
