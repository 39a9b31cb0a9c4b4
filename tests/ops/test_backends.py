"""Every backend gives what the reference gives, and says so when it cannot."""

import pytest
import torch

from fastweights.ops.backends import BACKENDS, choose
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs, Spec
from tests.ops.calls import FAMILY, NORMALIZATIONS, PAIRS, gradients, random_call, relative_error

SHAPES = [  # B, T, H, D, M
    (2, 1, 1, 3, 4),
    (2, 7, 2, 5, 3),
    (1, 63, 2, 8, 16),
    (3, 100, 1, 16, 4),
    (1, 130, 2, 40, 33),
]
FAST = [(rule, backend) for rule, backend in PAIRS if backend != "reference"]


def everything(call, backend, **more):
    call = call.requiring_grad()
    outputs = call.run(backend, **more)
    return [*outputs, *gradients(outputs, call.inputs())]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), FAST)
def test_agrees_with_reference(rule, backend, normalization, shape):
    call = random_call(rule, normalization, *shape)
    assert relative_error(everything(call, backend), everything(call, "reference")) < 1e-12


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), FAST)
def test_float32(rule, backend, normalization):
    call = random_call(rule, normalization, 2, 100, 2, 16, 8)
    assert relative_error(everything(call.to(torch.float32), backend), everything(call, "reference")) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
def test_half_precision_inputs(rule, backend, normalization, dtype):
    call = random_call(rule, normalization, 2, 100, 2, 16, 8).to(dtype)
    exact = everything(call.to(torch.float64), "reference")
    found = everything(call, backend)
    assert relative_error(found, exact) < 1e-2
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32


@pytest.mark.parametrize(("rule", "backend"), FAST)
def test_strided_inputs(rule, backend):
    call = random_call(rule, "attention", 2, 40, 3, 8, 6)
    strided = call.with_inputs([x.flip(0).transpose(-1, -2).contiguous().mT.flip(0) for x in call.inputs()])
    assert not strided.q.is_contiguous()
    assert relative_error(everything(strided, backend), everything(call, "reference")) < 1e-12


def test_step_functions_obey_the_family():
    """The ten readable lines of a rule and its row of coefficients are the same rule."""
    for rule in FAMILY:
        call = random_call(rule, B=1, T=1, H=1)
        gates = {name: gate[0, 0] for name, gate in call.gates.items()}
        a, e, w = RULES[rule].coefficients(**gates)
        k, v, W = call.k[0, 0, 0], call.v[0, 0, 0], call.state[0][0, 0]
        faded = W if a is None else a * W
        expected = (
            faded - (0 if e is None else e) * torch.outer(k, k @ faded) + (1 if w is None else w) * torch.outer(k, v)
        )
        torch.testing.assert_close(call.run()[1][0, 0], expected)


def spec(rule="delta", T=4, grad=False):
    call = random_call(rule, T=T)
    call = call.requiring_grad() if grad else call
    return Spec.of(Inputs(RULES[rule], call.q, call.k, call.v, call.gates, *call.state))


def test_a_spec_counts_sequences_packed_or_not():
    call = random_call("sum", B=1, T=9, H=2, D=5, M=3)
    bounds = torch.tensor([0, 4, 4, 9])
    apart, packed = (Spec.of(Inputs(RULES["sum"], call.q, call.k, call.v, {}, cu_seqlens=x)) for x in (None, bounds))
    assert (apart.N, apart.T, apart.H, apart.D, apart.M, apart.packed) == (1, 9, 2, 5, 3, False)
    assert (packed.N, packed.T, packed.H, packed.D, packed.M, packed.packed) == (3, 9, 2, 5, 3, True)


def test_auto_takes_the_first_that_can():
    assert choose(spec())[0].name == next(name for name in BACKENDS if not BACKENDS[name].unavailable())
    assert choose(spec("schlag2021"))[0].name == "reference"
    assert choose(spec(T=1, grad=True))[0].name == "reference"


def test_environment_overrides_auto(monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_BACKEND", "reference")
    assert choose(spec())[0].name == "reference"
    assert choose(spec(), "chunked")[0].name == "chunked"


@pytest.mark.parametrize(("D", "M", "fits"), [(512, 256, True), (513, 256, False), (512, 257, False)])
def test_the_largest_heads_of_the_gpu_kernels(D, M, fits):
    q, v = torch.empty(1, 3, 1, D, device="meta"), torch.empty(1, 3, 1, M, device="meta")
    reason = BACKENDS["triton"].prepare(Spec.of(Inputs(RULES["sum"], q, q, v, {}))).reason
    sizes = f"up to 512 and values up to 256 features, got D = {D} and M = {M}"
    assert ("run on CUDA devices" if fits else sizes) in reason


def test_a_backend_asked_for_by_name_is_never_replaced(monkeypatch):
    with pytest.raises(ValueError, match=r"'chunked' cannot run this call: rule 'schlag2021' .*these can: reference"):
        choose(spec("schlag2021"), "chunked")
    monkeypatch.setenv("FASTWEIGHTS_BACKEND", "chunked")
    with pytest.raises(ValueError, match="outside the family"):
        choose(spec("fwp1991"))
