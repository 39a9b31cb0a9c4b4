"""What a memory answers, how it is filled over time, how much it holds, and edits in closed form."""

import math

import pytest
import torch

import fastweights as fw
from tests.ops.calls import CALLS, NORMALIZATIONS, random_call


def orthonormal(n, d, B=1, H=1):
    """n orthonormal keys for each head, (B, n, H, d)."""
    return torch.linalg.qr(torch.randn(B, H, d, d, dtype=torch.float64))[0].transpose(1, 2)[:, :n]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", CALLS)
def test_states_and_recall_are_what_the_memory_itself_reads(rule, normalization):
    call = random_call(rule, normalization)
    more = {"rule": call.rule, "normalization": normalization, "state": fw.FastWeightState(*call.state), **call.gates}
    every = list(fw.probe.states(call.k, call.v, **more))
    y = torch.cat([fw.probe.recall(state, call.q[:, t : t + 1]).value for t, state in enumerate(every)], 1)
    whole = call.run()
    torch.testing.assert_close(y, whole[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(every[-1].W, whole[1], rtol=1e-12, atol=1e-13)


def test_recall_compares_with_what_was_stored():
    keys, values = orthonormal(3, 4), normal(1, 3, 1, 5)
    _, state = fw.fast_weight_memory(keys, keys, values, rule="sum")
    expected = values * torch.tensor([1.0, -2.0, 0.0]).view(1, 3, 1, 1)
    found = fw.probe.recall(state, keys, expected)
    torch.testing.assert_close(found.value, values)
    torch.testing.assert_close(found.cosine.flatten(), torch.tensor([1.0, -1.0, 0.0]).double())
    size = values[0, 2].norm()
    torch.testing.assert_close(found.error.flatten(), torch.stack([0 * size, 0 * size + 1.5, size]))
    with pytest.raises(ValueError, match=r"keys must have shape \(B, S, H, D\) = \(1, S, 1, 4\)"):
        fw.probe.recall(state, values)
    with pytest.raises(ValueError, match="got 2 for 3 keys"):
        fw.probe.recall(state, keys, values[:, :2])


def test_spectra_of_orthonormal_writes():
    keys, values = orthonormal(4, 6, 2, 3), orthonormal(4, 6, 2, 3)
    found = fw.probe.spectra(keys, values, rule="sum")
    for t in range(4):
        expected = torch.tensor([1.0] * (t + 1) + [0.0] * (5 - t)).double().expand(2, 3, 6)
        torch.testing.assert_close(found.values[:, t], expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(found.effective_rank[:, t], torch.full((2, 3), t + 1.0).double())
        torch.testing.assert_close(found.norm[:, t], torch.full((2, 3), math.sqrt(t + 1)).double())
    empty = fw.FastWeightState(torch.zeros(1, 1, 3, 3))
    assert fw.probe.effective_rank(empty).item() == 0
    skewed = fw.FastWeightState(torch.diag(torch.tensor([3.0, 1.0])).double()[None, None])
    assert fw.probe.effective_rank(skewed).item() == pytest.approx(4 / 3**0.75)


def test_what_was_overwritten_is_lost_and_the_rest_stays():
    keys = orthonormal(3, 3)[:, [0, 1, 2, 0]]
    values, ones = normal(1, 4, 1, 3), torch.ones(1, 4, 1, dtype=torch.float64)
    kept = fw.probe.retention(keys, values, rule="delta", beta=ones, bound=1e-6)
    assert kept.readable[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    assert kept.count.flatten().tolist() == [1, 2, 3, 3] and kept.age.flatten().tolist() == [0, 1, 2, 2]
    lost = fw.probe.retention(keys, values, rule="gated", beta=ones, bound=1e-6)
    assert lost.age.flatten().tolist() == [0, 0, 0, 0], "at beta = 1 the gated rule keeps the last value alone"
    none = fw.probe.retention(keys, values, rule="gated", beta=0 * ones)
    assert none.age.flatten().tolist() == [-1] * 4
    with pytest.raises(ValueError, match="bound must be above 0"):
        fw.probe.retention(keys, values, rule="sum", bound=0)


def test_the_sum_rule_errs_as_theory_says():
    # Random directions: each of the n - 1 other keys adds a value times a dot product of variance 1 / d.
    d, trials = 32, 200
    found = fw.probe.capacity("sum", d_key=d, sizes=[1, 9, 17, 33, 65], trials=trials, bound=0.6)
    for size, error in zip(found.sizes, found.errors, strict=True):
        assert error == pytest.approx(math.sqrt((size - 1) / d), rel=4 / math.sqrt(trials), abs=1e-12)
    assert found.d_dot == d and found.held == 9
    assert fw.probe.capacity("sum", d_key=d, sizes=[2, 60], bound=0.01).held == 0


def test_the_delta_rule_learns_no_more_associations_than_there_are_dimensions():
    found = fw.probe.capacity("delta", d_key=6, sizes=[3, 5, 7, 12], passes=2000, trials=4, bound=0.05)
    assert found.held == 5 and found.errors[0] < 1e-12, "seven equations in six unknowns have no solution"


@pytest.mark.parametrize("feature_map", fw.list_feature_maps())
@pytest.mark.parametrize("rule", fw.list_rules())
def test_capacity_takes_every_rule_and_map(rule, feature_map):
    once, again = (fw.probe.capacity(rule, feature_map, 4, sizes=[1, 2], trials=2, seed=3) for _ in range(2))
    assert once == again and all(math.isfinite(error) for error in once.errors)


def test_capacity_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="sizes must be whole numbers"):
        fw.probe.capacity("sum", sizes=[3, 2])
    with pytest.raises(ValueError, match="trials must be at least 1"):
        fw.probe.capacity("sum", trials=0)
    with pytest.raises(ValueError, match="gate of rule 'sum'"):
        fw.probe.capacity("sum", beta=1.0)


def test_capacity_is_drawn_with_a_line_for_each_memory():
    pytest.importorskip("matplotlib")
    curves = [fw.probe.capacity(rule, d_key=4, trials=2) for rule in ("sum", "delta")]
    (axes,) = fw.probe.plot_capacity(curves).axes
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert [tuple(line.get_ydata()) for line in lines] == [curve.errors for curve in curves]
    assert f"sum, identity: holds {curves[0].held}" in axes.get_legend().get_texts()[0].get_text()
    with pytest.raises(ValueError, match="nothing to draw"):
        fw.probe.plot_capacity([])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_edits_change_their_association_and_no_orthogonal_one(normalization):
    W, z = normal(2, 3, 6, 4), torch.rand(2, 3, 6).double() + 1 if normalization else None
    state = fw.FastWeightState(W, z)
    keys = torch.rand(2, 6, 3, 6).double() * (torch.arange(6) < 3) + 0.1 * (torch.arange(6) < 3)
    first, value = keys[:, :1], normal(2, 1, 3, 4)
    edited = fw.probe.overwrite(state, first, value)
    torch.testing.assert_close(fw.probe.recall(edited, first).value, value, rtol=1e-12, atol=1e-13)
    apart = normal(2, 5, 3, 6) * (torch.arange(6) >= 3)
    before, after = (fw.probe.recall(x, apart).value for x in (state, edited))
    assert torch.equal(before, after), "to the last bit"
    # An orthogonal key that shares entries with it.
    other = normal(2, 1, 3, 6)
    other = other - first * (other * first).sum(-1, keepdim=True) / first.square().sum(-1, keepdim=True)
    before, after = (fw.probe.recall(x, other).value for x in (state, edited))
    torch.testing.assert_close(before, after, rtol=1e-10, atol=1e-12)
    gone = fw.probe.forget(edited, first)
    torch.testing.assert_close(fw.probe.recall(gone, first).value, 0 * value, rtol=0, atol=1e-13)
    assert torch.equal(fw.probe.recall(gone, apart).value, fw.probe.recall(state, apart).value)
    # One edit for several keys that overlap.
    several, values = keys[:, :3], normal(2, 3, 3, 4)
    answered = fw.probe.recall(fw.probe.overwrite(state, several, values), several).value
    torch.testing.assert_close(answered, values, rtol=1e-9, atol=1e-10)


def test_an_edit_is_a_write_of_the_delta_rule():
    k, v = normal(2, 1, 3, 5), normal(2, 1, 3, 4)
    state = fw.FastWeightState(normal(2, 3, 5, 4))
    _, written = fw.fast_weight_memory(k, k, v, rule="delta", beta=1 / k.square().sum(-1), state=state)
    torch.testing.assert_close(fw.probe.overwrite(state, k, v).W, written.W)


def test_a_normalised_memory_takes_a_key_that_was_never_written():
    W, z = torch.zeros(1, 1, 3, 2).double(), torch.tensor([0.0, 1, 2]).double().view(1, 1, 3)
    key, value = torch.tensor([2.0, 0, 0]).double().view(1, 1, 1, 3), normal(1, 1, 1, 2)
    edited = fw.probe.overwrite(fw.FastWeightState(W, z), key, value)
    torch.testing.assert_close(fw.probe.recall(edited, key).value, value)
    assert edited.z.flatten().tolist() == [2, 1, 2]


def test_edits_refuse_keys_that_no_memory_can_answer():
    state, keys, values = fw.FastWeightState(normal(1, 2, 4, 3)), normal(1, 2, 2, 4), normal(1, 2, 2, 3)
    with pytest.raises(ValueError, match="head 1 depend on each other linearly"):
        dependent = keys.clone()
        dependent[:, 1, 1] = -3 * keys[:, 0, 1]
        fw.probe.overwrite(state, dependent, values)
    with pytest.raises(ValueError, match="batch 0, head 0, key 1 is 0"):
        fw.probe.forget(state, keys * torch.tensor([[1.0, 1], [0, 1]]).view(1, 2, 2, 1))
    with pytest.raises(ValueError, match="got 1 for 2 keys"):
        fw.probe.overwrite(state, keys, values[:, :1])
