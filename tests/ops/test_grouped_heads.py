"""Several heads of values, gates and state that share a head of queries and keys."""

import pytest
import torch

import fastweights as fw
from tests.ops.calls import HERE, gradients, random_call, relative_error

H, GROUP = 2, 3


def grouped_call(rule="gated_delta", normalization=None, B=2, T=70, D=5, M=3, dtype=torch.float64):
    """A call of `H * GROUP` heads, with queries and keys of every `GROUP`-th of them only."""
    call = random_call(rule, normalization, B, T, H * GROUP, D, M, dtype)
    call.q, call.k = call.q[:, :, ::GROUP].contiguous(), call.k[:, :, ::GROUP].contiguous()
    return call.requiring_grad()


def repeated(call):
    """The same call with its queries and keys repeated."""
    q, k, *rest = call.inputs()
    return call.with_inputs([q.repeat_interleave(GROUP, 2), k.repeat_interleave(GROUP, 2), *rest])


def everything(outputs, call):
    return [*outputs, *gradients(outputs, call.inputs())]


MARKS = {
    "rows": lambda B, T: {},
    "mask": lambda B, T: {"mask": torch.rand(B, T) < 0.7},
    "starts": lambda B, T: {"starts": torch.rand(B, T) < 0.1},
}


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("normalization", [None, "attention"])
@pytest.mark.parametrize("rule", ["sum", "gated_delta", "gated_delta per key", "gated_delta log"])
@pytest.mark.parametrize("backend", HERE)
def test_shared_heads_are_repeated_ones(backend, rule, normalization, marks):
    call = grouped_call(rule, normalization)
    options = MARKS[marks](2, 70)
    expected = everything(repeated(call).run("reference", **options), call)
    assert relative_error(everything(call.run(backend, **options), call), expected) < 1e-10


@pytest.mark.parametrize("backend", HERE)
def test_packed(backend):
    call = grouped_call(B=1)
    call.state = random_call("gated_delta", None, 3, 1, H * GROUP, 5, 3, seed=3).requiring_grad().state
    bounds = torch.tensor([0, 40, 40, 70])
    expected = everything(repeated(call).run("reference", cu_seqlens=bounds), call)
    assert relative_error(everything(call.run(backend, cu_seqlens=bounds), call), expected) < 1e-10


@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta per key"])
@pytest.mark.parametrize("threads", [1, 5, 40])
def test_on_the_cpu_nothing_is_repeated(threads, rule, monkeypatch):
    """And gradients are summed in float32 for 16-bit queries and keys, the same on any number of threads."""
    call = grouped_call(rule, B=1, T=100, dtype=torch.bfloat16)
    expected = everything(repeated(call.to(torch.float64)).run("reference"), call)

    def no_copies(*args, **options):
        raise AssertionError("a copy of queries or keys for every head")

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", no_copies)
    torch.set_num_threads(threads)
    found = everything(call.run("cpu"), call)
    assert relative_error(found, expected) < 2e-2
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(found, everything(call.run("cpu"), call), strict=True))


@pytest.mark.parametrize("backend", HERE)
def test_nan_stays_in_its_heads(backend):
    """A key is that of its group's heads; a value that of one head."""
    clean = grouped_call(dtype=torch.float32)
    spoilt = grouped_call(dtype=torch.float32)
    with torch.no_grad():
        for call in (clean, spoilt):
            # A decay of 0 would empty the memory of what is not a number.
            call.gates["decay"].clamp_(min=0.05)
        spoilt.k[0, 20, 1, 2] = spoilt.v[1, 30, 0, 1] = float("nan")
    before, after = (everything(call.run(backend), call) for call in (clean, spoilt))
    lost = torch.zeros(2, 70, H * GROUP, dtype=torch.bool)
    lost[0, 20:, GROUP:] = lost[1, 30:, 0] = True
    assert torch.equal(~after[0].isfinite().all(-1), lost)
    assert torch.equal(before[0][~lost], after[0][~lost])
    # Gradients of queries before that, and of the other group.
    torch.testing.assert_close(before[2][0, :20], after[2][0, :20])
    torch.testing.assert_close(before[2][0, :, 0], after[2][0, :, 0])


def test_heads_that_do_not_divide():
    q, v, beta = torch.rand(1, 4, 2, 3), torch.rand(1, 4, 3, 3), torch.rand(1, 4, 3)
    with pytest.raises(ValueError, match="or a multiple of its heads"):
        fw.fast_weight_memory(q, q, v, beta=beta)
    with pytest.raises(ValueError, match=r"beta must have shape \(B, T, H\) = \(1, 4, 4\)"):
        fw.fast_weight_memory(q, q, torch.rand(1, 4, 4, 3), beta=beta)
