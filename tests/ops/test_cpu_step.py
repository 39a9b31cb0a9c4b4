"""One token or a few in C++, against the paper's equations: every rule, map, gate and kind of state."""

import os
from dataclasses import replace

import pytest
import torch

from fastweights.feature_maps import feature_map
from fastweights.ops import backends, reference
from fastweights.ops.cpu import build, step
from fastweights.ops.features import Features, MapFeatures
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.rules import RULES, Coefficients
from fastweights.ops.spec import Inputs, Spec
from fastweights.ops.state import FastWeightState
from tests.ops.calls import BY_FORM, FAMILY, NORMALIZATIONS, random_call, relative_error

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

FEATURES = {
    "none, l2": Features.named("none", l2=True, scale=0.5),
    "elu, sum, logits": Features.named("elu", sum=True, logits=True),
    "relu, logits": Features.named("relu", logits=True),
    "silu, l2": Features.named("silu", l2=True),
    "dpfp, sum": Features.named("dpfp", nu=3, sum=True),
}


def problem(call, **more):
    return Inputs(RULES[call.rule], call.q, call.k, call.v, call.gates, *call.state, **more)


def run(inputs):
    """[y, W] or [y, W, z] by the C++, which must be what "auto" chooses."""
    backend, executable = backends.choose(Spec.of(inputs))
    assert backend.name == "cpu" and step.takes(Spec.of(inputs))
    return [x for x in executable(inputs) if x is not None]


def expected(inputs):
    mapped = inputs.mapped()
    # Mapped in PyTorch: the C++ of maps is part of what is tested.
    q, k = inputs.features.apply(inputs.q.to(mapped.q.dtype), inputs.k.to(mapped.k.dtype), inputs.normalized)
    inputs = replace(mapped, q=q.to(mapped.q.dtype), k=k.to(mapped.k.dtype)).expanded()
    return [x for x in reference.run(replace(inputs, in_place=False)) if x is not None]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", [*FAMILY, *BY_FORM])
@pytest.mark.parametrize(("T", "D", "M"), [(1, 20, 9), (3, 7, 37), (2, 1, 1)])
def test_every_rule(rule, normalization, T, D, M):
    inputs = problem(random_call(rule, normalization, 2, T, 3, D, M))
    assert relative_error(run(inputs), expected(inputs)) < 1e-13
    # From an empty memory.
    empty = replace(inputs, W=None, z=None, attention=normalization is not None)
    assert relative_error(run(empty), expected(empty)) < 1e-13


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", ["sum", "gated", "comba", "gated_delta", "gated_delta log", "decay per key"])
@pytest.mark.parametrize("features", FEATURES)
def test_raw_heads_and_logits(features, rule, normalization):
    phi = FEATURES[features]
    call = random_call(rule, normalization, 2, 2, 2, 5, 18)
    q, k = call.q - 0.2, call.k - 0.2
    gates = {name: x.logit(1e-3) if phi.logits and not name.startswith("log") else x for name, x in call.gates.items()}
    D = phi.size(5)
    if call.gates.get("decay", q).dim() == 4 and "per key" in rule:
        gates["decay"] = torch.rand(2, 2, 2, D, dtype=torch.float64)
    state = (torch.randn(2, 2, D, 18, dtype=torch.float64), torch.rand(2, 2, D, dtype=torch.float64))
    inputs = Inputs(RULES[call.rule], q, k, call.v, gates, *state[: len(call.state)], features=phi)
    assert relative_error(run(inputs), expected(inputs)) < 1e-12


def test_a_map_that_it_does_not_know():
    call = random_call("delta", None, 2, 1, 2, 4, 3)
    phi = MapFeatures(feature_map("favor", 4, m=3).double().eval())
    inputs = replace(problem(call), W=torch.randn(2, 2, 6, 3, dtype=torch.float64), features=phi)
    assert relative_error(run(inputs), expected(inputs)) < 1e-13


def test_a_rule_of_ones_own():
    own = replace(RULES["delta"], name="double", coefficients=lambda beta: Coefficients(None, beta, 2 * beta))
    own = replace(
        own,
        step=lambda W, k, v, read, beta: (
            RULES["delta"].step(W, k, v, read, beta) + (k.unsqueeze(-1) * (beta * v).unsqueeze(-2))
        ),
    )
    inputs = replace(problem(random_call("delta", None, 2, 2, 2, 4, 3)), rule=own)
    assert relative_error(run(inputs), expected(inputs)) < 1e-13


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)], ids=str
)
def test_narrow_inputs(dtype, tolerance):
    """The state is float32, and so is all that is computed."""
    call = random_call("gated_delta", "attention", 2, 3, 2, 64, 80).to(dtype)
    ours, exact = run(problem(call)), expected(problem(call.to(torch.float64)))
    assert [x.dtype for x in ours] == [dtype, torch.float32, torch.float32]
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() < (tolerance if a.dtype == dtype else 1e-6) * b.norm()


def test_heads_that_share_keys_and_tensors_of_any_strides():
    call = random_call("gated_delta", "attention", 2, 2, 6, 5, 17)
    wide = torch.randn(2, 6, 2, 30, dtype=torch.float64)
    v = wide.transpose(1, 2)[..., 3:20]
    keys = torch.rand(2, 2, 5, 3, dtype=torch.float64).transpose(2, 3)
    beta = call.gates["beta"].repeat_interleave(2, 1)[:, ::2]
    inputs = replace(problem(call), q=call.q[:, :, :3], k=keys, v=v, gates={**call.gates, "beta": beta})
    inputs = replace(inputs, W=call.state[0].mT.contiguous().mT)
    assert relative_error(run(inputs), expected(inputs)) < 1e-13


@pytest.mark.parametrize("rule", ["delta", "gated_delta per key"])
def test_packed_sequences_and_starts(rule):
    """Streams of different memories, some with no token now; a memory that is emptied forgets NaN."""
    call = random_call(rule, "attention", 1, 6, 2, 5, 4)
    call.state = random_call(rule, "attention", 5, 1, 2, 5, 4, seed=3).state
    bounds, starts = torch.tensor([0, 1, 1, 3, 5, 6]), torch.zeros(1, 6, dtype=torch.bool)
    starts[0, 4] = True
    call.state[0][3] = float("nan")
    inputs = problem(call, cu_seqlens=bounds, starts=starts)
    ours, want = run(inputs), expected(inputs)
    assert ours[0][0, 3].isnan().all() and ours[0][0, 4].isfinite().all()
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta per key", "gated_delta log", "gated_delta log per key"])
def test_a_decay_of_zero_empties_the_memory(rule):
    """Of its values and of what divides them, whatever they were."""
    call = random_call(rule, "attention", 2, 2, 2, 5, 4)
    for name, gate in call.gates.items():
        if "decay" in name:
            gate[:, 0] = -torch.inf if name == "log_decay" else 0
    spoilt = replace(call, state=tuple(x * torch.nan for x in call.state))
    call.state = tuple(x * 0 for x in call.state)
    assert all(torch.equal(a, b) for a, b in zip(run(problem(spoilt)), run(problem(call)), strict=True))


def test_nan_stays_with_its_head_and_after_its_token():
    call = random_call("gated_delta", None, 2, 4, 2, 5, 19)
    clean = run(problem(call))
    call.k[0, 2, 1, 0], call.v[1, 1, 0, 3] = float("nan"), float("inf")
    y, W = run(problem(call))
    depends = torch.zeros(2, 4, 2, 19, dtype=torch.bool)
    depends[0, 2:, 1], depends[1, 1:, 0, 3] = True, True
    assert torch.equal(y != clean[0], depends)
    assert torch.equal((clean[1] != W).flatten(2).any(-1), torch.tensor([[False, True], [True, False]]))


def test_mask():
    call = random_call("gated_delta", "attention", 2, 3, 2, 5, 4)
    mask = torch.tensor([[True, False, True], [False, True, True]])
    call.k[~mask] = float("nan")
    ours, want = call.run("cpu", mask=mask), call.run("reference", mask=mask)
    assert relative_error(ours, want) < 1e-13
    assert ours[0][~mask].eq(0).all()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_in_place(normalization):
    """The state is overwritten where that was offered, and autograd hears of it."""
    call = random_call("delta", normalization, 2, 1, 2, 5, 17)
    kept = [x.clone() for x in call.state]
    plain = call.run("cpu")
    assert all(torch.equal(a, b) for a, b in zip(call.state, kept, strict=True))
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    product = weight * call.state[0]
    ours = call.run("cpu", in_place=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert all(x is y or x.data_ptr() == y.data_ptr() for x, y in zip(ours[1:], call.state, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        state = FastWeightState(*(x.clone() for x in kept))
        fast_weight_memory(
            call.q, call.k, call.v, state=state, normalization=normalization, in_place=True, **call.gates
        )


def test_gradients_and_long_sequences_go_elsewhere():
    call = random_call("delta", None, 2, 1, 2, 5, 4)
    assert step.takes(Spec.of(problem(call)))
    assert not step.takes(Spec.of(problem(call.requiring_grad())))
    assert not step.takes(Spec.of(problem(random_call("delta", None, 1, step.MOST_TOKENS + 1))))
    assert not step.takes(Spec.of(problem(random_call("fwp1991", None, 1, 1))))


def test_the_number_of_threads_changes_no_bit():
    call = random_call("gated_delta", "attention", 3, 2, 5, 128, 100, torch.float32)
    results = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        results.append(run(problem(call)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_process_that_was_forked_computes_too(monkeypatch):
    """Threads are not there after a fork, and nobody waits for them; PyTorch's own functions would."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.set_num_threads(2)
    inputs = problem(random_call("delta", None, 2, 1, 8, 128, 128, torch.float32))
    y, _ = run(inputs)
    child = os.fork()
    if child == 0:
        os._exit(0 if (run(inputs)[0].numpy() == y.numpy()).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
