"""A kernel that is wrong on this machine is found, reported and never used; no GPU needed to see that."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from fastweights.ops import chunked, family
from fastweights.ops.backends import BACKENDS, choose
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.gpu import memory as triton
from fastweights.ops.gpu import self_check
from fastweights.ops.gpu.memory import self_check as memory_check
from fastweights.ops.gpu.memory.signatures import WalkSignature
from fastweights.ops.gpu.memory.variants import (
    FEW,
    LONG,
    MAPPED_ROWS,
    RECURRENT_ROWS,
    TABLE,
    ChunkedWalk,
    FusedWalk,
    RecurrentWalk,
    SplitWalk,
    Variant,
    candidates,
    configuration,
    from_integers,
    holds_features,
    may_go_by_token,
    plain_rows,
    power_of_two,
    to_integers,
)
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs, Spec
from tests.ops.calls import FAMILY, random_call

CPU = torch.device("cpu")


class Right:
    """What the kernels should give."""

    def __init__(self, tokens, bounds, dtype, back, tied, variant, features):
        self.dtype, self.tied, self.chunk = dtype, tied, variant.chunk

    def forward(self, tokens, W, bounds, keep):
        return chunked.OPERATOR.forward(self.untied(tokens), W, bounds, self.dtype, keep, self.chunk, False)

    def backward(self, tokens, dy, dW, kept, bounds, wants_dW):
        grads = chunked.OPERATOR.backward(dy, dW, self.untied(tokens), kept, bounds, self.chunk, False)
        *rest, dW = grads
        if self.tied:
            rest[-2:] = [rest[-2] + rest[-1]]
        rest = iter(rest)
        return *(None if x is None else next(rest) for x in tokens), dW

    def untied(self, tokens):
        return (*tokens[:5], tokens[4]) if self.tied else tokens


class Wrong(Right):
    """dk is off, as it is where a compiler loses a transposition."""

    def backward(self, *arguments):
        dq, dk, *rest = super().backward(*arguments)
        return dq, dk.flip(1), *rest


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """The self-check on the CPU, with a disk of its own; counts the checks that ran."""
    counted = []
    compare = memory_check._compare
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_wanted", lambda device: True)
    monkeypatch.setattr(self_check, "_capturing", lambda: False)
    monkeypatch.setattr(self_check, "machine", lambda *_: {"gpu": "a GPU", "torch": "torch 9.9"})
    monkeypatch.setattr(memory_check, "_walks", Right)
    monkeypatch.setattr(memory_check, "_compare", lambda *x: counted.append(x) or compare(*x))
    forget(monkeypatch)
    yield counted
    self_check._verdicts.cache_clear()


def forget(monkeypatch):
    """What a new process knows."""
    monkeypatch.setattr(self_check, "_reasons", {})
    self_check._verdicts.cache_clear()


def a_kind(dtype=torch.float32, decay=False, packed=False):
    return WalkSignature(
        dtype, 8, 12, decay, True, False, True, packed, configuration(8, 12, dtype, 999, 256, by_token=False)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decay", "packed"), [(False, False), (True, True)])
def test_right_kernels_pass(checked, dtype, decay, packed):
    kind = a_kind(dtype, decay, packed)
    assert memory_check.refusal(kind, 2, CPU) is None
    verdict = self_check._verdicts(CPU, memory_check.SOURCE)[kind.key]
    names = ["y", "W", "dq", "dk", "dv", *(["ddecay"] if decay else []), "derase", "dW"]
    assert list(verdict.errors) == names


def test_it_checks_once_and_remembers_on_disk(checked, monkeypatch):
    kind = a_kind()
    for _ in range(2):
        memory_check.refusal(kind, 2, CPU)
    assert len(checked) == 1
    forget(monkeypatch)
    assert memory_check.refusal(kind, 2, CPU) is None
    assert len(checked) == 1
    assert json.loads(self_check.path(CPU, memory_check.SOURCE).read_text())["machine"]["gpu"] == "a GPU"


def test_another_machine_checks_again(checked, monkeypatch):
    memory_check.refusal(a_kind(), 2, CPU)
    forget(monkeypatch)
    monkeypatch.setattr(self_check, "machine", lambda *_: {"gpu": "a GPU", "torch": "torch 9.10"})
    memory_check.refusal(a_kind(), 2, CPU)
    assert len(checked) == 2


def test_wrong_kernels_are_reported_and_refused_for_good(checked, monkeypatch):
    monkeypatch.setattr(memory_check, "_walks", Wrong)
    with pytest.warns(UserWarning, match=r"wrong on this machine: off dk by .*a GPU, torch 9.9.*'chunked' instead"):
        reason = memory_check.refusal(a_kind(), 2, CPU)
    assert "off dk by" in reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory_check.refusal(a_kind(), 2, CPU) == reason
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="wrong on this machine"):
        assert memory_check.refusal(a_kind(), 2, CPU) == reason
    assert len(checked) == 1


def test_where_walks_token_by_token_are_wrong_those_by_chunks_stand_in(checked, monkeypatch):
    asked = []

    def refusal(kind, heads, device):
        asked.append(type(kind.variant))
        return "wrong" if isinstance(kind.variant, RecurrentWalk) else None

    monkeypatch.setattr(memory_check, "refusal", refusal)
    call = random_call("delta", None, T=3, M=3).to(torch.float32)
    problem = Inputs(RULES["delta"], call.q, call.k, call.v, call.gates, *(x.float() for x in call.state))
    spec = Spec.of(problem)
    (part,) = family.parts(spec)
    # What runs is what was found to be right.
    assert isinstance(from_integers(triton._walk(spec, part).settings[1]), FusedWalk)
    assert asked == [RecurrentWalk, FusedWalk]


def test_the_warning_says_what_stands_in(checked, monkeypatch):
    monkeypatch.setattr(memory_check, "_walks", Wrong)
    kind = a_kind()._replace(variant=configuration(8, 12, torch.float32, 999, 256))
    with pytest.warns(
        UserWarning, match=r"token by token are wrong on this machine.*'auto' takes kernels that walk by chunks"
    ):
        memory_check.refusal(kind, 2, CPU)


def test_nan_is_wrong(checked, monkeypatch):
    class Poisoned(Right):
        def forward(self, *arguments):
            y, *rest = super().forward(*arguments)
            return y * float("nan"), *rest

    monkeypatch.setattr(memory_check, "_walks", Poisoned)
    with pytest.warns(UserWarning, match="off y by inf"):
        memory_check.refusal(a_kind(), 2, CPU)


def test_kernels_that_do_not_compile_are_refused(checked, monkeypatch):
    def broken(*arguments):
        raise ValueError("out of resource: shared memory")

    monkeypatch.setattr(memory_check, "_walks", broken)
    with pytest.warns(UserWarning, match="failed their self-check: ValueError: out of resource"):
        assert memory_check.refusal(a_kind(), 2, CPU)


def test_a_crash_of_the_gpu_is_remembered(checked, monkeypatch):
    def crashing(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(memory_check, "_walks", crashing)
    with pytest.raises(RuntimeError, match="start again"):
        memory_check.refusal(a_kind(), 2, CPU)
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="illegal memory access"):
        assert memory_check.refusal(a_kind(), 2, CPU)


def test_no_check_while_a_graph_is_captured(checked, monkeypatch):
    monkeypatch.setattr(self_check, "_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"run the call once before, or set FASTWEIGHTS_SELF_CHECK=0"):
        memory_check.refusal(a_kind(), 2, CPU)
    assert not checked


def test_it_can_be_turned_off(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert self_check._wanted(cuda)
    monkeypatch.setenv("FASTWEIGHTS_SELF_CHECK", "0")
    assert not self_check._wanted(cuda)
    assert memory_check.refusal(a_kind(), 2, cuda) is None


def test_a_broken_or_forbidden_disk_is_no_obstacle(checked, monkeypatch):
    self_check.path(CPU, memory_check.SOURCE).parent.mkdir(parents=True)
    self_check.path(CPU, memory_check.SOURCE).write_text("{")
    assert memory_check.refusal(a_kind(), 2, CPU) is None

    def full(*arguments):
        raise OSError("disk full")

    forget(monkeypatch)
    monkeypatch.setattr(self_check, "write_atomically", full)
    assert memory_check.refusal(a_kind(torch.bfloat16), 2, CPU) is None


def a_problem(normalization=None):
    call = random_call("delta", normalization, T=9, D=8, M=12, dtype=torch.float32)
    return Spec.of(Inputs(RULES["delta"], call.q, call.k, call.v, call.gates, *call.state))


def test_auto_goes_past_wrong_kernels(checked, monkeypatch):
    monkeypatch.setitem(BACKENDS, "triton", replace(triton.BACKEND, unavailable=lambda: None))
    monkeypatch.setattr(triton, "_refusal", lambda spec: None)
    assert choose(a_problem())[0].name == "triton"
    forget(monkeypatch)
    self_check.path(CPU, memory_check.SOURCE).unlink()
    monkeypatch.setattr(memory_check, "_walks", Wrong)
    with pytest.warns(UserWarning, match="wrong on this machine"):
        assert choose(a_problem())[0].name != "triton"
    with pytest.raises(
        ValueError, match=r"'triton' cannot run this call: .*wrong on this machine.*these can: .*chunked"
    ):
        choose(a_problem(), "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("normalization", [None, "attention"])
@pytest.mark.parametrize("rule", FAMILY)
def test_it_checks_what_the_rule_runs(rule, normalization, most, dtype):
    """`family.parts` says what `family.run` does."""
    call = random_call(rule, normalization, T=3, M=3).to(dtype)
    problem = Inputs(RULES[rule], call.q, call.k, call.v, call.gates, *(x.float() for x in call.state))
    seen = []

    def recurrence(q, k, v, a, e, w, W, cu_seqlens, dtype):
        tied = e is not None and e is w
        assert q.dtype == k.dtype == v.dtype
        seen.append((k.dtype, v.shape[-1], a is not None, e is not None, w is not None and not tied, tied))
        return v.new_zeros(v.shape), W

    family.run(problem, recurrence, most=most)
    parts = family.parts(Spec.of(problem), most)
    assert seen == parts
    assert most is None or all(most >= part.M for part in parts)


def miscompiled(config: Variant) -> bool:
    """Whether some kernel of the variant is known to be."""
    return config.step >= 64 and max(config.forward_warps, config.backward_warps) > 4


def test_the_table_holds_no_row_that_is_known_to_be_miscompiled():
    for *_, config in plain_rows():
        assert not miscompiled(config)


def test_triton_can_compile_the_sizes_in_the_table():
    """Tiles and warps are powers of two, and the tiles of a matrix product have at least 16 rows and columns."""
    assert all(D.bit_count() == M.bit_count() == 1 for _, D, M, _ in plain_rows())
    mapped = [configuration(D, 16, dtype, 999, 64, Features.named("elu")) for D in (16, 32, 64, 128) for dtype in TABLE]
    for config in [*(row for *_, row in plain_rows()), *mapped]:
        sizes = {name: value for name, value in vars(config).items() if name in ("chunk", "columns", "key_tile")}
        warps = {name: value for name, value in vars(config).items() if name.endswith("_warps") or name == "lanes"}
        assert all(value.bit_count() == 1 for value in (sizes | warps).values()), config
        assert min(sizes.values()) >= 16 and max(warps.values()) <= 8, config


def test_rows_for_some_calls_stand_where_others_stand():
    """Rows are looked through in the order of the table, to which these are joined; a new size would come too late."""
    for table in (MAPPED_ROWS, RECURRENT_ROWS):
        for dtype, rows in table.items():
            assert rows.keys() <= TABLE[dtype].keys()


@pytest.mark.parametrize("features", [PLAIN, Features.named("elu", 0, sum=True, logits=True)], ids=["plain", "elu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_size_has_a_row_that_holds_it(dtype, features):
    sizes = (1, 8, 16, 17, 31, 32, 33, 64, 65, 127, 128, 200, 256, 512)
    for D, M, walks, T in product(sizes, sizes[:-1], (1, FEW, FEW + 1), (1, 100, 4 * LONG)):
        if features.maps and not holds_features(D, D, M):
            continue
        config = configuration(D, M, dtype, walks, T, features)
        # One program has all values where it computes every gradient; groups are walked twice with the same inverses.
        assert not isinstance(config, FusedWalk) or config.columns >= M
        assert not isinstance(config, ChunkedWalk) or not config.groups or config.prepared
        if isinstance(config, SplitWalk):
            assert not features.maps or config.key_tile >= D
            assert config.chunks_per_program == 1 or config.key_tile >= D
            # Attention normalisation makes 33 value columns of 32: narrow keys beside more values than they have.
            assert config.chunk < 64 or config.tile(power_of_two(D)) >= 64
        # A warp of a walk token by token has whole values, and what there is of a state in registers.
        if isinstance(config, RecurrentWalk):
            assert T < LONG and M <= 32 and D <= 32
            assert power_of_two(M) >= 32 // config.lanes * config.backward_warps


def test_what_goes_token_by_token():
    def recurrent(T: int, dtype: torch.dtype = torch.float32, **options: object) -> bool:
        *others, last = candidates(16, 16, dtype, 999, T, **options)
        # Where it fails its self-check there is another.
        assert isinstance(last, ChunkedWalk)
        assert all(isinstance(variant, RecurrentWalk) for variant in others)
        return bool(others)

    assert recurrent(1) and recurrent(LONG - 1) and not recurrent(LONG)
    assert not recurrent(256, by_token=False) and not recurrent(256, features=Features(logits=1))
    assert not recurrent(256, torch.bfloat16)
    assert may_go_by_token(False, 8192, 32, 32) and not may_go_by_token(True, 8, 16, 16)
    assert not may_go_by_token(False, 8193, 8, 32)


def test_neither_does_what_is_mapped_on_chip():
    for kind in memory_check.shipped():
        if isinstance(kind, WalkSignature) and kind.features != PLAIN:
            config = kind.variant
            assert not isinstance(config, SplitWalk) or config.key_tile >= kind.features.size(kind.D)
            assert not miscompiled(config)


def test_coefficients_of_what_is_checked_are_those_of_calls():
    """Decays per key are decays, and what is erased and written by one coefficient is written by no other."""
    for kind in memory_check.shipped():
        assert kind.decay or not kind.per_key
        assert not kind.tied or (kind.erase and not kind.write)


def test_few_walks_go_in_groups():
    many, few, one = (configuration(64, 64, torch.bfloat16, walks, 4 * LONG) for walks in (FEW + 1, FEW, 1))
    assert one.groups > few.groups > many.groups == 0
    shorter = [configuration(64, 64, torch.bfloat16, walks, 4 * LONG - 1).groups for walks in (FEW, FEW // 2)]
    assert shorter[0] == 0 < shorter[1]
    assert configuration(64, 64, torch.bfloat16, 1, LONG - 1) == many
    assert configuration(128, 128, torch.bfloat16, FEW // 2, LONG).groups >= 8
    assert configuration(128, 128, torch.bfloat16, FEW // 2 + 1, LONG).groups == 0
    assert configuration(256, 64, torch.bfloat16, 1, LONG).groups == 0
    kinds = list(memory_check.shipped())
    assert len(set(kinds)) == len(kinds)
    walks = [kind for kind in kinds if isinstance(kind, WalkSignature)]
    plain = [kind for kind in walks if kind.features == PLAIN and not kind.per_key]
    rows = {config for dtype, _, _, config in plain_rows() if dtype.itemsize < 8}
    assert {replace(kind.variant, **({"groups": 0} if kind.variant not in rows else {})) for kind in plain} == rows
    for kind in walks:
        assert from_integers(to_integers(kind.variant)) == kind.variant


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("features", [PLAIN, Features.named("dpfp", 1, sum=True, logits=True)], ids=["plain", "dpfp-1"])
def test_the_exact_gradients_are_those_of_autograd(features, tied):
    """Maps, gates and a coefficient that is two: what they add around the recurrence's own backward pass."""
    kind = a_kind(decay=True, packed=True)._replace(write=not tied, tied=tied, features=features)
    torch.manual_seed(0)
    bounds = torch.tensor([0, 33, 33, 70])
    q, k, dy = torch.randn(1, 70, 3, 8), 0.3 * torch.randn(1, 70, 3, 8), torch.randn(1, 70, 3, 12)
    a, e, w = (0.2 + 0.6 * torch.rand(1, 70, 3) for _ in range(3))
    W = torch.randn(3, 3, features.size(8), 12)
    inputs = (q, k, dy.flip(1), a, e, None if tied else w, W)
    dW = torch.randn_like(W)

    leaves = [None if x is None else x.double().requires_grad_() for x in inputs]
    gates = [None if x is None else features.gate(x) for x in leaves[3:6]]
    gates[2] = gates[1] if tied else gates[2]
    y, W_end = chunked.recurrence(
        features.of(leaves[0]), features.of(leaves[1]), leaves[2], *gates, leaves[6], bounds, torch.float64
    )
    grads = torch.autograd.grad([y, W_end], [x for x in leaves if x is not None], [dy.double(), dW.double()])
    for found, expected in zip(memory_check._exact(kind, inputs, bounds, dy, dW), [y, W_end, *grads], strict=True):
        torch.testing.assert_close(found, expected.detach())


def test_the_check_does_not_wait_for_pytorch_s_compiler():
    """Nor for its symbolic shapes. Importing them takes longer than compiling the kernels."""
    script = """
import sys, torch
from fastweights.ops.gpu.memory import autograd, self_check
from tests.ops import test_self_check as ours
self_check._walks = ours.Right
verdict = self_check.check_of(ours.a_kind(), 2).run(torch.device("cpu"))
assert verdict.errors and not verdict.failure, verdict
sys.exit("torch._dynamo" in sys.modules or "sympy" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=Path(__file__).parents[2])
