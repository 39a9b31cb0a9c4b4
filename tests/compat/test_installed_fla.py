"""Beside an installed flash-linear-attention: the same signatures and results, and ours as one of its backends."""

import inspect
import sys
import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from fastweights.compat import fla
from tests.compat.calls import NAMES, B, K, close, inputs, kind, loop, states


@pytest.fixture(scope="module")
def original():
    """fla's own module of that path."""

    def load(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(f"fla.{path}")

    try:
        load("ops")
    except ImportError as error:
        pytest.skip(f"fla cannot be imported ({error}): pip install fla-core==0.6.0")
    return load


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_fla(original, name):
    module = original("ops.gated_delta_product") if kind(name) == "gated_delta_product" else original("ops")
    theirs = inspect.signature(getattr(module, name)).parameters.values()
    ours = inspect.signature(getattr(fla, name)).parameters
    named = [x for x in theirs if x.kind is not x.VAR_KEYWORD]
    positional = [x for x in ours.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [x.name for x in positional] == [x.name for x in named]
    assert [x.default for x in named if x.default is not x.empty] == [
        ours[x.name].default for x in named if x.default is not x.empty
    ]


@pytest.mark.parametrize(
    "name,naive,transposed",
    [
        ("delta_rule", "delta_rule_recurrence", True),
        ("gated_delta_rule", "naive_recurrent_gated_delta_rule", False),
        ("gated_delta_rule", "naive_chunk_gated_delta_rule", False),
        ("kda", "naive_recurrent_kda", False),
        ("gla", "naive_recurrent_gla", False),
        ("simple_gla", "naive_recurrent_simple_gla", False),
        ("linear_attn", "naive_recurrent_linear_attn", False),
        ("comba", "naive_recurrent_comba", False),
        ("gated_delta_product", "naive_recurrent_gated_delta_product", False),
    ],
)
def test_results_are_those_of_fla(original, name, naive, transposed):
    call = inputs(f"chunk_{name}", torch.float32)
    more = {"initial_state": states(B).float(), "output_final_state": True}
    o, final = getattr(fla, f"chunk_{name}")(**call, **more)
    if name == "gated_delta_product":
        more["scale"] = K**-0.5
    if name == "gla":
        call["gk"] = call.pop("g")
    if transposed:
        call = {x: y.transpose(1, 2) for x, y in call.items()}
    theirs, last = getattr(original(f"ops.{name}.naive"), naive)(**call, **more)
    close(o, theirs.transpose(1, 2) if transposed else theirs, 2e-5)
    close(final, last, 2e-5)


@pytest.fixture
def registered(original):
    """fla with ours among its backends, which is taken out again."""
    backends = original("backends")
    names = fla.register_with_fla()
    yield original("ops"), names
    for registry in (*backends._operation_registries.values(), *backends._function_registries.values()):
        registry._backends.pop("fastweights", None)


def test_fla_computes_on_the_cpu_once_registered(registered, monkeypatch):
    operators, names = registered
    for name in [*names, "fused_recurrent_retention", "fused_recurrent_linear_attn"]:
        call = inputs(name, torch.float32)
        close(getattr(operators, name)(**call)[0], loop(name, **call)[0], 2e-5)
    monkeypatch.setenv("FLA_FASTWEIGHTS", "0")
    with pytest.raises(Exception, match=r"driver|CUDA|Triton|cuda"):
        operators.chunk_kda(**inputs("chunk_kda", torch.float32))


def test_registering_needs_fla(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    with pytest.raises(ImportError, match=r"register_with_fla\(\) needs fla-core 0.6: pip install fla-core==0.6.0"):
        fla.register_with_fla()


def test_reasons_to_take_a_call_from_fla(monkeypatch):
    def reason(size, dtype, name="chunk_gated_delta_rule", device="meta", rows=1, **more):
        x, gate = torch.zeros(rows, 2, 1, size, dtype=dtype, device=device), torch.zeros(rows, 2, 1, device=device)
        return fla.reason(name, x, x, x, gate, **({} if "simple_gla" in name else {"beta": gate}), **more)

    half = torch.bfloat16
    assert reason(128, half) == (False, "fla has kernels for it")
    assert reason(32, half) == (True, "fla computes in tiles of 64, more than heads of 32 and 32 fill")
    assert reason(128, torch.float32) == (True, "fla rounds float32 to TF32 in its products")
    assert reason(128, torch.float64, "chunk_kda") == (True, "fla has no kernels for float64")
    for name in ("chunk_kda", "fused_chunk_simple_gla"):
        assert reason(128, torch.float32, name) == (True, "fla rounds float32 to TF32 in its products")
        assert reason(32, half, name) == (False, "fla has kernels for it")
    for name in ("chunk_gated_delta_rule", "chunk_kda"):
        assert reason(256, half, name)[0] is False
        assert reason(257, half, name) == (True, "fla takes keys of at most 256 numbers, got 257")
        assert reason(128, half, name, rows=65_535)[0] is False
        assert reason(128, half, name, rows=65_536)[1].endswith("at most 65535 heads over all rows, got 65536")
    state = torch.zeros(1, 1, 128, 128, dtype=half, device="meta")
    assert reason(128, half, "chunk_kda", initial_state=state.float())[0] is False
    assert reason(128, half, "chunk_kda", initial_state=state)[1].endswith("in float32 only, got torch.bfloat16")
    assert reason(128, torch.float32, "fused_recurrent_simple_gla") == (False, "fla has kernels for it")
    assert reason(128, half, device="cpu") == (True, "fla has no kernels for tensors on cpu")
    assert reason(128, half, device="cpu", cp_context="ring") == (False, "fastweights does not support cp_context")
    state = torch.zeros(1, 1, 128, 128, device="meta", requires_grad=True)
    for version, taken in {"3.6": True, "3.7.1": False}.items():
        gpu = SimpleNamespace(IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=version == "3.7.1")
        monkeypatch.setitem(sys.modules, "fla.utils", gpu)
        assert reason(128, half, initial_state=state)[0] is taken
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
        reason(128, half, head_first=True)
