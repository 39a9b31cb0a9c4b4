"""Layers of models in use: short convolution, trained decay rates, beta up to 2, normalised and gated output."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import fastweights as fw
from fastweights.layers.fast_weight import OUTPUT_NORMS, RECIPES
from fastweights.layers.short_conv import ShortConvolution
from tests.ops.calls import relative_error

OPTIONS = {
    **RECIPES,
    "sum": {"rule": "sum", "short_conv": 2, "normalization": "attention"},
    "comba": {**RECIPES["kda"], "rule": "comba", "beta_max": 2.0},
    "rates": {"rule": "gated_delta", "decay_per": "key", "beta_max": 2.0, "normalization": "smooth_l2", "bias": True},
    "sigmoid decay": {"rule": "gated_delta", "beta_max": 2.0, "output_norm": "rms"},
}


def make(name):
    torch.manual_seed(0)
    return fw.FastWeightAttention(12, 2, **OPTIONS[name]).double()


def random_input(B=2, T=17):
    torch.manual_seed(1)
    return torch.randn(B, T, 12, dtype=torch.float64, requires_grad=True)


def everything(layer, x, y, state):
    """Outputs, state and the gradients of input and weights."""
    loss = y.square().sum() + sum(s.square().sum() for s in state.tensors().values())
    return [y, *state.tensors().values(), *torch.autograd.grad(loss, [x, *layer.parameters()])]


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_is_split_is_token_by_token(name):
    layer, x = make(name), random_input()
    whole = everything(layer, x, *layer(x))
    for cuts in ([0, 1, 3, 17], [0, 9, 17], list(range(18))):
        ys, state = [], None
        for start, end in pairwise(cuts):
            y, state = layer(x[:, start:end], state)
            ys.append(y)
        assert relative_error(everything(layer, x, torch.cat(ys, 1), state), whole) < 1e-10
    ys, state = [], None
    for t in range(17):
        y, state = layer.step(x[:, t], state)
        ys.append(y)
    assert relative_error(everything(layer, x, torch.stack(ys, 1), state), whole) < 1e-10


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences_are_separate_ones_from_their_own_states(name):
    layer, x = make(name), random_input(1)
    bounds = [0, 2, 2, 9, 17]
    states = [layer(random_input(1)[:, i : i + 3])[1] for i in range(4)]
    joined = type(states[0])(**{key: torch.cat([s.tensors()[key] for s in states]) for key in states[0].tensors()})
    y, end = layer(x, joined, cu_seqlens=torch.tensor(bounds))
    for i, (first, last) in enumerate(pairwise(bounds)):
        y_i, end_i = layer(x[:, first:last], states[i]) if first < last else (y[:, :0], states[i])
        found = [y[:, first:last], *(s[i : i + 1] for s in end.tensors().values())]
        assert relative_error(found[first == last :], [y_i, *end_i.tensors().values()][first == last :]) < 1e-12


@pytest.mark.parametrize("name", OPTIONS)
def test_texts_are_separate_and_padding_leaves_no_trace(name):
    layer, x = make(name), random_input()
    _, state = layer(random_input()[:, :4])
    starts, mask = torch.zeros(2, 17, dtype=torch.bool), torch.ones(2, 17, dtype=torch.bool)
    starts[0, [5, 6]] = starts[1, 0] = True
    mask[0, [0, 7, 8]] = mask[1, 9:11] = mask[1, 16] = False
    garbage = x.detach().masked_fill(~mask[..., None], float("nan"))
    y, end = layer(garbage, state, mask=mask, starts=starts)
    assert not y[~mask].any()
    for row, texts in ((0, [range(1, 5), range(5, 6), [6, *range(9, 17)]]), (1, [[*range(9), *range(11, 16)]])):
        for i, text in enumerate(texts):
            before = state.reorder(torch.tensor([row])) if row == 0 and i == 0 else None
            alone, alone_end = layer(x[row : row + 1, list(text)], before)
            assert relative_error([y[row : row + 1, list(text)]], [alone]) < 1e-12
        ends = [s[row : row + 1] for s in end.tensors().values()]
        assert relative_error(ends, list(alone_end.tensors().values())) < 1e-12


def test_a_gated_deltanet_written_out():
    layer, x = make("gated-deltanet"), random_input(1, 6)
    parts = layer.project(x)[0].split([12, 12, 12, 12, 2, 2], -1)
    padded = F.pad(torch.cat(parts[:3], -1), (0, 0, 3, 0))
    mixed = sum(padded[3 - j : 9 - j] * layer.conv.weight[:, j] for j in range(4))
    q, k, v = (F.silu(part).unflatten(-1, (2, 6)) for part in mixed.split(12, -1))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta = parts[4].sigmoid()
    decay = (-layer.A_log.exp() * F.softplus(parts[5] + layer.dt_bias)).exp()
    W, rows = torch.zeros(2, 6, 6, dtype=torch.float64), []
    for t in range(6):
        W = decay[t][:, None, None] * W
        error = v[t] - torch.einsum("hd,hdm->hm", k[t], W)
        W = W + torch.einsum("hd,hm->hdm", k[t], beta[t][:, None] * error)
        y = torch.einsum("hd,hdm->hm", q[t], W)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
        rows.append(layer.out((y * F.silu(parts[3][t].unflatten(-1, (2, 6)))).flatten()))
    torch.testing.assert_close(layer(x)[0][0], torch.stack(rows))


def test_kda_has_a_decay_for_every_key_channel():
    layer = make("kda")
    assert layer.dt_bias.shape == (2 * 6,)
    steps = F.softplus(layer.dt_bias)
    assert steps.min() >= 1e-3 and steps.max() <= 0.1
    assert (layer.A_log >= 0).all() and (layer.A_log.exp() <= 16).all()


def test_beta_goes_up_to_its_maximum():
    layer = fw.FastWeightAttention(4, 1, rule="delta", beta_max=2.0)
    gates, logits = layer._gates([torch.tensor([[[[30.0]]]])])
    assert not logits
    torch.testing.assert_close(gates["beta"], torch.full((1, 1, 1), 2.0))


def test_states_are_saved_with_what_the_convolution_carries(tmp_path):
    layer, x = make("kda"), random_input()
    _, state = layer(x)
    state.save(tmp_path / "state")
    again = fw.FastWeightState.load(tmp_path / "state")
    torch.testing.assert_close(layer.step(x[:, 0], again)[0], layer.step(x[:, 0], state)[0])
    with pytest.raises(ValueError, match="state has no `recent`"):
        layer.step(x[:, 0], fw.FastWeightState(state.W))


def test_autocast_keeps_the_dtype():
    layer = fw.FastWeightAttention.recipe("kda", 12, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(torch.randn(2, 5, 12))
        y, state = layer.step(torch.randn(2, 12), state)
    assert y.dtype == torch.bfloat16 and state.W.dtype == torch.float32


def test_a_segment_leaves_nothing_but_the_last_inputs_in_memory():
    _, state = fw.FastWeightAttention.recipe("kda", 12, 2)(torch.randn(1, 1000, 12))
    assert state.recent.untyped_storage().nbytes() == 4 * 3 * 36


def test_compiles_without_graph_breaks():
    layer, x = make("kda"), random_input()
    marks = {"mask": torch.arange(17).expand(2, 17) < 15, "starts": torch.arange(17).expand(2, 17) == 6}
    y, state = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, **marks)
    assert relative_error(everything(layer, x, y, state), everything(layer, x, *layer(x, **marks))) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"short_conv": 1}, "at least 2 steps, got 1"),
        ({"rule": "sum", "beta_max": 2.0}, "beta_max is for rules with a beta, which 'sum' has not"),
        ({"beta_max": 0.0}, "beta_max must be above 0"),
        ({"beta_max": float("nan")}, "beta_max must be above 0, got nan"),
        ({"d_value": 0}, "d_value must be a whole number of at least 1, got 0"),
        ({"decay_per": "key"}, "decay_per is for rules with a decay, which 'delta' has not"),
        ({"rule": "decay", "decay_per": "keys"}, "unknown decay_per 'keys'; did you mean 'key'"),
        ({"output_norm": "rsm"}, "unknown output_norm 'rsm'; did you mean 'rms'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        fw.FastWeightAttention(12, 2, **options)


def test_output_norms_are_all_in_use():
    assert {options.get("output_norm", "none") for options in OPTIONS.values()} == set(OUTPUT_NORMS)


def test_short_convolution_sees_its_own_text_only():
    """With a table of rows and as a convolution, it is the same."""
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4).double()
    x, recent = torch.randn(2, 9, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    plain = conv(x, recent)
    marked = conv(x, recent, mask=torch.ones(2, 9, dtype=torch.bool))
    assert relative_error(marked, plain) < 1e-12
    y, _ = conv(x, recent, starts=torch.arange(9).expand(2, 9) == 4)
    assert relative_error([y[:, 4:]], [conv(x[:, 4:])[0]]) < 1e-12
