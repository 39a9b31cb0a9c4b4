"""One law in many forms: how a sequence is cut, packed or padded changes nothing but speed."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.ops.features import Features, MapFeatures
from fastweights.ops.normalization import l2_normalize
from tests.ops.calls import CALLS, HERE, NORMALIZATIONS, PAIRS, gradients, random_call, relative_error

shapes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.integers(1, 130),
        "H": st.integers(1, 3),
        "D": st.integers(1, 9),
        "M": st.integers(1, 9),
        "seed": st.integers(0, 1000),
    }
)


class FavorLike:
    """A map that no kernel knows, of which queries may come up to a factor."""

    kernel, dim = None, 6

    def map(self, x):
        return torch.cat([x.exp(), (-x[..., :2]).exp()], -1)

    def scaled(self, x):
        return 3 * self.map(x)


def run_in_pieces(call, bounds, backend):
    """The outputs of consecutive pieces joined, and the last state."""
    ys, state = [], call.state
    for start, end in pairwise(bounds):
        piece = call.tokens(start, end)
        piece.state = state
        y, *state = piece.run(backend)
        ys.append(y)
    return [torch.cat(ys, 1), *state]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
@settings(max_examples=6)
@given(shape=shapes, data=st.data())
def test_whole_is_any_split_is_token_by_token(rule, backend, normalization, shape, data):
    T = shape["T"]
    cuts = data.draw(st.lists(st.integers(1, T), max_size=4, unique=True))
    call = random_call(rule, normalization, **shape).requiring_grad()
    whole = call.run(backend)
    whole += gradients(whole, call.inputs())
    ways = [sorted({0, T, *cuts})] + ([list(range(T + 1))] if T <= 40 else [])
    for bounds in ways:
        pieces = run_in_pieces(call, bounds, backend)
        assert relative_error(pieces + list(gradients(pieces, call.inputs())), whole) < 1e-10


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
def test_causal(rule, backend, normalization):
    """An output hangs on nothing that comes after it: not in value, not in gradient."""
    call = random_call(rule, normalization, 1, 70, 2, 4, 3).requiring_grad()
    before = call.run(backend)[0]
    for x in torch.autograd.grad(before[:, :40].sum(), call.inputs()[: 3 + len(call.gates)]):
        assert not x[:, 40:].any()
    changed = call.with_inputs([x.detach().clone() for x in call.inputs()])
    for x in (changed.q, changed.k, changed.v, *changed.gates.values()):
        x[:, 40:] = 0.25
    assert torch.equal(changed.run(backend)[0][:, :40], before[:, :40])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
def test_packed_is_separate(rule, backend, normalization):
    lengths = [5, 70, 1, 0, 64, 33]
    calls = [random_call(rule, normalization, 1, max(n, 1), 2, 4, 3, seed=i) for i, n in enumerate(lengths)]
    parts = [
        [x[:, :n] for x in (c.q, c.k, c.v, *c.gates.values())] + list(c.state)
        for c, n in zip(calls, lengths, strict=True)
    ]
    time_like = 3 + len(calls[0].gates)
    joined = [torch.cat(xs, 1 if i < time_like else 0) for i, xs in enumerate(zip(*parts, strict=True))]
    # Tokens after the last sequence belong to none, whatever they are.
    joined = [torch.cat([x, x[:, :6] * torch.nan], 1) if i < time_like else x for i, x in enumerate(joined)]
    packed = calls[0].with_inputs(joined).requiring_grad()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    y, *state = packed.run(backend, cu_seqlens=bounds)
    grads = torch.autograd.grad(y.square().sum() + sum(s.square().sum() for s in state), packed.inputs())
    assert not any(x[:, bounds[-1] :].any() for x in (y, *grads[:time_like]))
    for i, (call, n) in enumerate(zip(calls, lengths, strict=True)):
        span = slice(bounds[i], bounds[i + 1])
        if n == 0:
            assert torch.equal(state[0][i], call.state[0][0])
            continue
        call = call.requiring_grad()
        y_i, *state_i = call.run("reference")
        grads_i = torch.autograd.grad(y_i.square().sum() + sum(s.square().sum() for s in state_i), call.inputs())
        found = [y[:, span], *(s[i : i + 1] for s in state)]
        found += [g[:, span] if j < time_like else g[i : i + 1] for j, g in enumerate(grads)]
        assert relative_error(found, [y_i, *state_i, *grads_i]) < 1e-10


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
def test_padding_leaves_no_trace(rule, backend, normalization, side):
    call = random_call(rule, normalization, 2, 50, 2, 4, 3)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, {"left": slice(0, 20), "right": slice(30, 50), "inside": slice(10, 30)}[side]] = False
    # What stands in padding must not matter, whatever it is.
    for x in (call.q, call.k, call.v, *call.gates.values()):
        x[~mask] = float("nan")
    y, *state = call.run(backend, mask=mask)
    assert not y[~mask].any()
    for row in range(2):
        kept = mask[row]
        alone = call.with_inputs(
            [
                x[row : row + 1][:, kept] if i < 3 + len(call.gates) else x[row : row + 1]
                for i, x in enumerate(call.inputs())
            ]
        )
        y_row, *state_row = alone.run("reference")
        found = [y[row : row + 1][:, kept], *(s[row : row + 1] for s in state)]
        assert relative_error(found, [y_row, *state_row]) < 1e-12


FEATURES = [
    Features.named("elu", sum=True, logits=True),
    Features.named("relu", logits=True),
    Features.named("dpfp", nu=2, sum=True),
    Features.named("none", logits=True),
    MapFeatures(FavorLike(), l2_normalize, logits=True),
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: f.describe(4) if isinstance(f, Features) else "other")
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("backend", [*HERE, "auto"])
def test_raw_features_are_mapped_before_the_memory(backend, normalization, features):
    """Whoever runs the call, and with padding and new texts too, it is the call on what the maps make of its inputs."""
    call = random_call("gated_delta", normalization, 2, 9, 2, features.size(4), 3)
    raw = [torch.randn(2, 9, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gates = {name: gate.detach().requires_grad_() for name, gate in call.gates.items()}
    phi = features.of if isinstance(features, Features) else lambda x: features.normalize(features.phi.map(x))
    tokens = torch.arange(9).expand(2, 9)
    for marks in ({}, {"mask": tokens < 7}, {"starts": tokens == 4}):
        found = replace(call, q=raw[0], k=raw[1], gates=gates).run(backend, features=features, **marks)
        opened = {name: gate.sigmoid() if features.logits else gate for name, gate in gates.items()}
        expected = replace(call, q=phi(raw[0]), k=phi(raw[1]), gates=opened).run("reference", **marks)
        leaves = [*raw, *gates.values()]
        assert relative_error([*found, *gradients(found, leaves)], [*expected, *gradients(expected, leaves)]) < 1e-10


def test_every_rule_is_covered():
    assert {rule for rule, _ in PAIRS} == set(CALLS)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "backend"), PAIRS)
@pytest.mark.parametrize("cuts", [[], [0], [31, 32, 64], [69]])
def test_a_start_forgets_all_before_it(rule, backend, normalization, cuts):
    """Rows of several texts are those texts one by one, each from an empty memory, the first from the state given."""
    call = random_call(rule, normalization, 2, 70, 2, 4, 3).requiring_grad()
    starts = torch.zeros(2, 70, dtype=torch.bool)
    starts[:, cuts] = True
    marked = call.run(backend, starts=starts)
    bounds, pieces, state = sorted({0, 70, *cuts}), [], call.state
    for start, end in pairwise(bounds):
        piece = call.tokens(start, end)
        piece.state = tuple(torch.zeros_like(x) for x in state) if start in cuts else call.state
        y, *state = piece.run("reference")
        pieces.append(y)
    apart = [torch.cat(pieces, 1), *state]
    inputs = call.inputs()
    expected = torch.autograd.grad(_projected(apart), inputs, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(_projected(marked), inputs, allow_unused=True, materialize_grads=True)
    assert relative_error([*marked, *found], [*apart, *expected]) < 1e-10


def test_each_row_has_its_own_starts():
    call = random_call("delta", "attention", 2, 9, 2, 4, 3)
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[1, 4] = True
    y = call.run("chunked", starts=starts)[0]
    untouched, *_ = call.run("chunked")
    assert torch.equal(y[0], untouched[0]) and not torch.allclose(y[1, 4:], untouched[1, 4:])
    assert torch.allclose(y[1, :4], untouched[1, :4])


def _projected(outputs):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    return sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
