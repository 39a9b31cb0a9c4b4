"""`FastWeightAttention`: one layer, many rules, three ways to run it."""

import pytest
import torch

import fastweights as fw
from fastweights.feature_maps import ELU, FEATURE_MAPS
from fastweights.layers.fast_weight import NORMALIZATIONS
from fastweights.ops.rules import RULES
from tests.ops.calls import relative_error


def make(**options):
    torch.manual_seed(0)
    return fw.FastWeightAttention(12, 2, **options).double().eval()


def token_by_token(layer, x, state=None):
    ys = []
    for t in range(x.shape[1]):
        y, state = layer.step(x[:, t], state)
        ys.append(y)
    return torch.stack(ys, 1), state


def random_input(B=2, T=21):
    return torch.randn(B, T, 12, dtype=torch.float64, requires_grad=True)


COMBINATIONS = [
    *({"rule": rule, "normalization": norm} for rule in RULES for norm in NORMALIZATIONS),
    *({"feature_map": phi} for phi in FEATURE_MAPS),
    {"feature_map": "dpfp", "feature_map_options": {"nu": 3}, "d_head": 5, "d_value": 7, "bias": True},
    {"rule": "fwp1991", "project_queries": False, "feature_map": "identity", "normalization": None},
    {"output_scale": 0.25},
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_whole_is_split_is_token_by_token(options):
    layer, x = make(**options), random_input()
    y, state = layer(x)
    head, middle = layer(x[:, :8])
    tail, last = layer(x[:, 8:], middle)
    stepped, stepped_state = token_by_token(layer, x)
    results = [(y, state), (torch.cat([head, tail], 1), last), (stepped, stepped_state)]
    parameters = [x, *layer.parameters()]
    found = [
        [out, *s.tensors().values(), *torch.autograd.grad(out.square().sum() + s.W.sum(), parameters)]
        for out, s in results
    ]
    assert relative_error(found[1], found[0]) < 1e-10
    assert relative_error(found[2], found[0]) < 1e-10


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rule", RULES)
def test_padding_leaves_no_trace(rule, side):
    layer, x = make(rule=rule, normalization="both", bias=True), random_input()
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[1, slice(0, 6) if side == "left" else slice(15, 21)] = False
    garbage = x.detach().masked_fill(~mask[..., None], float("nan"))
    y, state = layer(garbage, mask=mask)
    alone, alone_state = layer(x[1:, mask[1]])
    assert relative_error([y[1:, mask[1]], state.W[1:], state.z[1:]], [alone, alone_state.W, alone_state.z]) < 1e-12
    assert not y[~mask].any()


def test_packed_is_separate():
    layer, x = make(normalization="both"), random_input(B=1)
    y, state = layer(x, cu_seqlens=torch.tensor([0, 9, 21]))
    first, _ = layer(x[:, :9])
    second, second_state = layer(x[:, 9:])
    assert relative_error([y, state.W[1:]], [torch.cat([first, second], 1), second_state.W]) < 1e-12


def test_is_the_paper_written_out():
    """Eqs. 4, 20-25 and 29 with plain matrices."""
    layer, x = make(feature_map="elu"), random_input(B=1, T=6)
    q, k, v, beta = (part.unflatten(-1, (2, -1)) for part in layer.project(x)[0].split([12, 12, 12, 2], -1))
    phi = lambda a: torch.nn.functional.elu(a) + 1  # noqa: E731
    rows = []
    W = torch.zeros(2, 6, 6, dtype=torch.float64)
    for t in range(6):
        read = []
        for h in range(2):
            key = phi(k[t, h]) / phi(k[t, h]).sum()
            v_bar = W[h] @ key
            v_new = beta[t, h].sigmoid() * v[t, h] + (1 - beta[t, h].sigmoid()) * v_bar
            W[h] = (W[h] + torch.outer(v_new, key) - torch.outer(v_bar, key)).detach()
            read.append(W[h] @ (phi(q[t, h]) / phi(q[t, h]).sum()))
        rows.append(layer.out(torch.cat(read)))
    torch.testing.assert_close(layer(x)[0][0], torch.stack(rows))


def test_favor_step_reads_with_the_features_it_wrote_with():
    layer = fw.FastWeightAttention(12, 2, feature_map="favor").train()
    layer.feature_map.redraw()
    x = torch.randn(1, 5, 12)
    before = layer.feature_map.projection.clone()
    token_by_token(layer, x)
    assert torch.equal(layer.feature_map.projection, before)
    layer(x)
    assert not torch.equal(layer.feature_map.projection, before)


def test_a_stream_holds_no_more_after_a_thousand_tokens():
    layer = make(normalization="both")
    with torch.no_grad():
        _, state = layer.step(torch.randn(1, 12, dtype=torch.float64))
        size = state.nbytes
        for _ in range(1000):
            y, state = layer.step(torch.randn(1, 12, dtype=torch.float64), state)
    assert state.nbytes == size
    assert y.isfinite().all()


def test_gates_add_one_output_per_head():
    """The paper's 16 K and 33 K parameters for beta are d_model * n_heads a layer."""
    count = lambda rule: sum(p.numel() for p in fw.FastWeightAttention(128, 8, rule=rule).parameters())  # noqa: E731
    assert 16 * (count("delta") - count("sum")) == 16_384
    assert count("gated_delta") - count("delta") == 128 * 8 + 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 10, "n_heads": 3}, "d_model = 10 does not divide into 3 heads"),
        ({"d_model": 0, "n_heads": 3}, "at least 1"),
        ({"d_model": 12, "n_heads": 2, "normalization": "summ"}, "unknown normalization 'summ'; did you mean 'sum'"),
        ({"d_model": 12, "n_heads": 2, "d_head": 5, "project_queries": False}, r"must be d_model = 12, got 2 \* 5"),
        ({"d_model": 12, "n_heads": 2, "feature_map": fw.feature_map("elu", 5)}, "made for d_key = 5, got d_key = 6"),
    ],
)
def test_construction_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        fw.FastWeightAttention(**arguments)


def test_input_errors():
    layer = fw.FastWeightAttention(12, 2)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, d_model = 12\), got \(2, 12\)"):
        layer(torch.rand(2, 12))
    with pytest.raises(ValueError, match=r"x must have shape \(B, d_model = 12\), got \(2, 3, 12\)"):
        layer.step(torch.rand(2, 3, 12))
    _, state = layer(torch.rand(2, 3, 12))
    with pytest.raises(ValueError, match=r"state.W must have shape \(3, 2, 6, 6\) here, got \(2, 2, 6, 6\)"):
        layer(torch.rand(3, 3, 12), state)
    with pytest.raises(ValueError, match="state has no `recent`"):
        fw.FastWeightAttention(12, 2, short_conv=2)(torch.rand(2, 3, 12), torch.zeros(2, 2, 6, 6))


@pytest.mark.parametrize("rule", fw.list_rules())
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_what_is_read_does_not_depend_on_the_numbers_features_are_scaled_by(rule, normalization):
    class Scaled(ELU):
        def scaled(self, x):
            return self.map(x) * torch.rand(*x.shape[:-1], 1, dtype=x.dtype).add(0.1)

    plain = fw.FastWeightAttention(6, 2, rule=rule, normalization=normalization, backend="reference").double()
    scaled = fw.FastWeightAttention(
        6, 2, rule=rule, feature_map=Scaled(3), normalization=normalization, backend="reference"
    ).double()
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    (y, state), (z, other) = plain(x), scaled(x)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(scaled.step(x[:, 0], other)[0], plain.step(x[:, 0], state)[0])
