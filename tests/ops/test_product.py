"""Several writes a token (DeltaProduct), and rates beyond 1."""

from dataclasses import replace

import pytest
import torch

import fastweights as fw
from fastweights.ops.features import Features
from tests.ops.calls import HERE, gradients, random_call, relative_error

N = 3


def call_of(rule, T=9, B=2):
    """A call of `N` writes a token."""
    call = random_call(rule, None, B, N * T, 2, 4, 3)
    call.q = call.q[:, :T].contiguous()
    call.gates = {name: x[:, :T] if "decay" in name else x for name, x in call.gates.items()}
    return call.requiring_grad()


def by_definition(call, mask=None, starts=None):
    """y and W of a loop that fades once a token, writes `N` times and reads once."""
    (W,), ys = call.state, []
    decay = call.gates["log_decay"].exp() if "log_decay" in call.gates else call.gates.get("decay")
    for t in range(call.q.shape[1]):
        if starts is not None:
            W = W.masked_fill(starts[:, t, None, None, None], 0)
        before = W
        if decay is not None:
            W = (decay[:, t] if decay.dim() == 4 else decay[:, t, :, None])[..., None] * W
        for i in range(N * t, N * t + N):
            k, v, beta = call.k[:, i], call.v[:, i], call.gates["beta"][:, i, :, None]
            W = W + k[..., None] * (beta * (v - (k[..., None] * W).sum(-2)))[..., None, :]
        y = (call.q[:, t, :, :, None] * W).sum(-2)
        if mask is not None:
            W = torch.where(mask[:, t, None, None, None], W, before)
            y = y * mask[:, t, None, None]
        ys.append(y)
    return [torch.stack(ys, 1), W]


@pytest.mark.parametrize("rule", ["delta", "gated_delta", "gated_delta log", "gated_delta per key"])
@pytest.mark.parametrize("backend", [*HERE, "auto"])
def test_a_token_fades_once_writes_n_times_and_reads_once(backend, rule):
    call = call_of(rule)
    tokens = torch.arange(9).expand(2, 9)
    for marks in ({}, {"mask": tokens < 7}, {"starts": tokens == 4}):
        outputs, expected = call.run(backend, **marks), by_definition(call, **marks)
        found = [*outputs, *gradients(outputs, call.inputs())]
        assert relative_error(found, [*expected, *gradients(expected, call.inputs())]) < 1e-12


def test_split_and_packed():
    call = call_of("gated_delta", B=1)
    y, W = call.run("cpu")
    first = replace(call.tokens(0, N * 4), q=call.q[:, :4])
    first.gates["decay"] = call.gates["decay"][:, :4]
    rest = replace(call.tokens(N * 4, N * 9), q=call.q[:, 4:])
    rest.gates["decay"] = call.gates["decay"][:, 4:]
    y_first, W_first = first.run("cpu")
    y_rest, W_rest = replace(rest, state=(W_first,)).run("cpu")
    torch.testing.assert_close(torch.cat([y_first, y_rest], 1), y)
    torch.testing.assert_close(W_rest, W)
    packed = replace(call, state=(torch.cat([call.state[0], W_first]),))
    y_packed, W_packed = packed.run("cpu", cu_seqlens=torch.tensor([0, 4, 9]))
    torch.testing.assert_close(y_packed, y)
    torch.testing.assert_close(W_packed, torch.cat([W_first, W]))


def test_logits_of_decays_stay_open_between_the_writes():
    call = call_of("gated_delta")
    expected = call.run("reference")
    call.gates = {name: x.clamp(0.01, 0.99) for name, x in call.gates.items()}
    expected = call.run("reference")
    call.gates = {name: x.logit() for name, x in call.gates.items()}
    assert relative_error(call.run("auto", features=Features.named("none", logits=True)), expected) < 1e-12


def test_what_does_not_fit():
    q, k, beta = torch.rand(1, 4, 2, 3), torch.rand(1, 8, 2, 3), torch.rand(1, 8, 2)
    with pytest.raises(ValueError, match="decay must have T = 4 tokens, as q has"):
        fw.fast_weight_memory(q, k, k, rule="gated_delta", beta=beta, decay=beta)
    with pytest.raises(ValueError, match=r"beta must have shape \(B, T, H\) = \(1, 8, 2\)"):
        fw.fast_weight_memory(q, k, k, beta=beta[:, :4])
    with pytest.raises(ValueError, match="k must have the shape of q"):
        fw.fast_weight_memory(q, k[:, :7], k[:, :7], beta=beta[:, :7])


@pytest.mark.parametrize("backend", HERE)
def test_a_rate_of_two_turns_what_is_stored(backend):
    """For a key of length 1, I - 2 k k^T is a reflection: written twice, every sign is back."""
    k = torch.eye(4, dtype=torch.float64)[None, [0, 0], None]
    W = torch.randn(1, 1, 4, 3, dtype=torch.float64)
    v, beta = torch.zeros(1, 2, 1, 3, dtype=torch.float64), torch.full((1, 2, 1), 2.0, dtype=torch.float64)
    y, state = fw.fast_weight_memory(k, k, v, beta=beta, state=fw.FastWeightState(W), backend=backend)
    torch.testing.assert_close(y[:, 0], -W[:, :, 0])
    torch.testing.assert_close(state.W, W)


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_rates_up_to_two_on_long_sequences(backend):
    """Keys of length 1 keep the memory bounded, and float32 follows float64."""
    call = random_call("gated_delta", None, 1, 500, 2, 16, 8)
    call.k, call.gates["beta"] = fw.l2_normalize(call.k - 0.05), 2 * call.gates["beta"]
    call.gates["decay"] = call.gates["decay"].clamp(min=0.9)
    exact = call.requiring_grad()
    outputs = exact.run("reference")
    expected = [*outputs, *gradients(outputs, exact.inputs())]
    narrow = call.to(torch.float32).requiring_grad()
    outputs = narrow.run(backend)
    assert relative_error([*outputs, *gradients(outputs, narrow.inputs())], expected) < 2e-5
