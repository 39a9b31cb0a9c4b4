"""From which writes a read comes: exact sums, and what they say of each rule."""

import pytest
import torch

import fastweights as fw
from tests.ops.calls import BY_FORM, FAMILY, NORMALIZATIONS, random_call


def attribution(call, **more):
    """The attribution of a random call."""
    named = {"rule": call.rule, "normalization": call.normalization, "state": fw.FastWeightState(*call.state)}
    return fw.probe.attribute(call.q, call.k, call.v, **{**named, **call.gates, **more})


@pytest.mark.parametrize("by", ["value", "write"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", [*FAMILY, *BY_FORM])
def test_parts_sum_to_what_is_read(rule, normalization, by):
    call = random_call(rule, normalization)
    found = attribution(call, by=by)
    torch.testing.assert_close(found.y, call.run()[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close((found.initial + found.parts.sum(3)).transpose(1, 2), found.y, rtol=1e-12, atol=1e-13)
    assert not found.weights.triu(1).any(), "no read comes from a later write"


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", ["comba", "gated_delta per key"])
def test_the_weight_of_a_value_is_its_derivative(rule, normalization):
    call = random_call(rule, normalization, B=1, H=1, T=5)
    found = attribution(call)
    y = lambda v: call.with_inputs([call.q, call.k, v, *call.gates.values(), *call.state]).run()[0]  # noqa: E731
    slopes = torch.autograd.functional.jacobian(y, call.v)[0, :, 0, 0, 0, :, 0, 0]
    torch.testing.assert_close(found.weights[0, 0], slopes, rtol=1e-12, atol=1e-14)


def test_a_value_that_was_overwritten_has_no_part_in_a_read():
    k = torch.eye(3, dtype=torch.float64)[[0, 1, 0, 0]].view(1, 4, 1, 3)
    v, beta = torch.randn(1, 4, 1, 2, dtype=torch.float64), torch.ones(1, 4, 1, dtype=torch.float64)
    by_value = fw.probe.attribute(k, k, v, rule="delta", beta=beta)
    by_write = fw.probe.attribute(k, k, v, rule="delta", beta=beta, by="write")
    assert by_value.weights[0, 0, 3].tolist() == [0, 0, 0, 1]
    assert by_write.weights[0, 0, 3].tolist() == [1, 0, 1, 1]
    torch.testing.assert_close(by_write.stored[0, 0, 3], v[0, 3, 0] - v[0, 2, 0])
    torch.testing.assert_close(by_write.shares.sum(-1), torch.ones(1, 1, 4).double())


def test_several_writes_a_token_and_shared_heads():
    call = random_call("gated_delta", T=8, H=4)
    decay, beta = call.gates["decay"][:, ::2], call.gates["beta"]
    q, k = call.q[:, ::2, ::2], call.k[:, :, ::2]
    gates = {"beta": beta, "decay": decay}
    y, _ = fw.fast_weight_memory(q, k, call.v, rule="gated_delta", **gates)
    found = fw.probe.attribute(q, k, call.v, rule="gated_delta", **gates)
    assert found.weights.shape == (2, 4, 4, 8)
    torch.testing.assert_close(found.y, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", ["schlag2021", "fwp1991"])
def test_other_rules_are_refused_with_a_reason(rule):
    call = random_call(rule)
    with pytest.raises(ValueError, match=f"'{rule}' is outside the family .* no sums over writes"):
        attribution(call)


def test_wrong_arguments_are_named():
    call = random_call("delta")
    with pytest.raises(ValueError, match="value"):
        attribution(call, by="token")
    with pytest.raises(ValueError, match=r"needs beta of shape \(2, 7, 2\)"):
        attribution(call, beta=None)


def test_interference_is_what_each_rule_makes_of_the_keys():
    keys = fw.l2_normalize(torch.randn(2, 5, 3, 4, dtype=torch.float64))
    dots = torch.einsum("bihd,bjhd->bhij", keys, keys)
    torch.testing.assert_close(fw.probe.interference(keys), dots)
    beta = torch.ones(2, 5, 3, dtype=torch.float64)
    delta = fw.probe.interference(keys, rule="delta", beta=beta)
    torch.testing.assert_close(delta[:, :, -1], torch.eye(5).double()[-1].expand(2, 3, 5), rtol=0, atol=1e-15)
    values = torch.randn(2, 5, 3, 6, dtype=torch.float64)
    _, state = fw.fast_weight_memory(keys, keys, values, rule="delta", beta=beta)
    mixed = torch.einsum("bhij,bjhm->bihm", delta, values)
    torch.testing.assert_close(fw.probe.recall(state, keys).value, mixed)
    orthonormal = torch.linalg.qr(torch.randn(2, 3, 5, 5, dtype=torch.float64))[0].transpose(1, 2)
    identity = torch.eye(5).double().expand(2, 3, 5, 5)
    torch.testing.assert_close(fw.probe.interference(orthonormal), identity, rtol=0, atol=1e-14)


def test_interference_under_attention_normalisation_is_a_mean():
    keys, queries = torch.rand(1, 6, 2, 4).double(), torch.rand(1, 3, 2, 4).double()
    weights = fw.probe.interference(keys, queries, rule="sum", normalization="attention")
    assert weights.shape == (1, 2, 3, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3).double())
    with pytest.raises(ValueError, match=r"queries must have shape \(B, N, H, D\)"):
        fw.probe.interference(keys, queries[:, :, :1])


@pytest.mark.parametrize("normalization", ["l2", "both"])
@pytest.mark.parametrize("recipe", [{"rule": "comba"}, {"rule": "gated_delta", "short_conv": 3, "decay_per": "key"}])
def test_the_reads_of_a_layer_are_explained(recipe, normalization):
    layer = fw.FastWeightAttention(12, 2, normalization=normalization, beta_max=0.9, **recipe).double()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    y, state = layer(x)
    call = fw.probe.inputs_of(layer, x)
    _, after = fw.fast_weight_memory(**call)
    torch.testing.assert_close(layer.out(fw.probe.attribute(**call).y.flatten(-2)), y, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(after.W, state.W)
    again = fw.probe.inputs_of(layer, x, state)
    torch.testing.assert_close(layer.out(fw.probe.attribute(**again).y.flatten(-2)), layer(x, state)[0])


def test_layers_without_fast_weights_have_no_inputs():
    with pytest.raises(TypeError, match="SoftmaxAttention, which has no fast weights"):
        fw.probe.inputs_of(fw.SoftmaxAttention(8, 2), torch.zeros(1, 2, 8))
