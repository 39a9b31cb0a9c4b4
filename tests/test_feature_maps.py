"""The maps phi, each against what the paper says of it."""

import copy
import math

import pytest
import torch

import fastweights as fw
from fastweights.feature_maps import FEATURE_MAPS, gram_schmidt
from fastweights.layers.cross_attention import FastWeightCrossAttention

OPTIONS = {
    "dpfp": [{"nu": 1}, {"nu": 3}, {"nu": 9}],
    "favor": [{"m": 3}, {"m": 12, "orthogonal": True}, {"stabilize": True}],
}
ALL = [(name, options) for name in FEATURE_MAPS for options in OPTIONS.get(name, [{}])]
POSITIVE = {"elu", "relu", "dpfp", "favor"}


@pytest.mark.parametrize(("name", "options"), ALL)
def test_shape_gradient_and_sign(name, options):
    phi = fw.feature_map(name, d_key=5, **options).double().eval()
    x = torch.randn(2, 7, 3, 5, dtype=torch.float64, requires_grad=True)
    out = phi(x)
    assert out.shape == (2, 7, 3, phi.dim)
    if name in POSITIVE:
        assert (out >= 0).all()
    if not options.get("stabilize"):  # the largest entry is held constant there, which differences see
        assert torch.autograd.gradcheck(phi, x[0, :2])


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype(name, dtype):
    x = torch.randn(3, 8).to(dtype)
    phi = fw.feature_map(name, d_key=8).eval()
    assert phi(x).dtype == dtype
    error = (phi(x).double() - phi(x.double())).norm() / phi(x.double()).norm()
    assert error < 1e-2


def test_elu_keeps_its_digits_far_below_zero():
    x = torch.tensor([-7.0, -5.5, -0.25, 0.0, 2.0], dtype=torch.bfloat16)
    exact = torch.nn.functional.elu(x.double()) + 1
    torch.testing.assert_close(fw.feature_map("elu", d_key=5)(x).double(), exact, rtol=2**-8, atol=0)


def listing_1(x, nu=1):
    """Listing 1 of the paper, its steps in its order."""
    x = torch.cat([x.relu(), (-x).relu()], dim=-1)
    rolled = torch.cat([x.roll(shifts=j, dims=-1) for j in range(1, nu + 1)], dim=-1)
    return torch.cat([x] * nu, dim=-1) * rolled


@pytest.mark.parametrize("nu", [1, 2, 3, 11])
def test_dpfp_is_listing_1(nu):
    x = torch.randn(4, 6)
    phi = fw.feature_map("dpfp", d_key=6, nu=nu)
    assert phi.dim == 2 * 6 * nu
    assert torch.equal(phi(x), listing_1(x, nu))


def test_dpfp_of_the_plane_has_at_most_one_nonzero():
    """Eqs. 33-36 and Fig. 1: each quadrant has a feature of its own, so quadrants are orthogonal."""
    x = torch.randn(1000, 2)
    features = fw.feature_map("dpfp", d_key=2)(x)
    assert ((features > 0).sum(-1) <= 1).all()
    quadrant = (x > 0).long() @ torch.tensor([1, 2])
    for i in range(4):
        active = features[quadrant == i].sum(0) > 0
        assert active.sum() == 1
    products = torch.stack([(x[:, 0] * s).relu() * (x[:, 1] * t).relu() for s in (1, -1) for t in (1, -1)], -1)
    torch.testing.assert_close(features.sum(-1), products.sum(-1))


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("orthogonal", [False, True])
def test_favor_is_an_unbiased_estimate_of_the_softmax_kernel(orthogonal, scale):
    torch.manual_seed(1)
    d, draws = 8, 4000
    q, k = 0.5 * torch.randn(5, d, dtype=torch.float64), 0.5 * torch.randn(5, d, dtype=torch.float64)
    phi = fw.feature_map("favor", d_key=d, m=12, orthogonal=orthogonal, scale=scale).double().train()
    estimates = torch.stack([(a * b).sum(-1) for a, b in (phi(q, k) for _ in range(draws))])
    kernel = ((q * k).sum(-1) / (math.sqrt(d) if scale else 1)).exp()
    standard_error = estimates.std(0) / math.sqrt(draws)
    assert ((estimates.mean(0) - kernel).abs() < 4 * standard_error).all()
    # ... and a sharp one: a wrong factor or norm would be far outside.
    assert (standard_error < 0.05 * kernel).all()


def test_orthogonal_features_are_orthogonal_in_blocks():
    rows = fw.feature_map("favor", d_key=6, m=15, orthogonal=True).projection
    gram = rows @ rows.mT
    for start in range(0, 15, 6):
        block = gram[start : start + 6, start : start + 6]
        torch.testing.assert_close(block, torch.diag(block.diag()), atol=1e-4, rtol=0)


def test_favor_redraws_in_training_only_and_shares_the_draw():
    phi = fw.feature_map("favor", d_key=4, m=8)
    x = torch.randn(3, 4)
    assert not torch.equal(phi(x), phi(x))
    a, b = phi(x, x)
    assert torch.equal(a, b)
    phi.eval()
    assert torch.equal(phi(x), phi(x))
    fixed = fw.feature_map("favor", d_key=4, m=8, redraw=False)
    assert torch.equal(fixed(x), fixed(x))


def test_favor_features_travel_with_the_state_dict():
    one, two = (fw.feature_map("favor", d_key=4, m=8).eval() for _ in range(2))
    x = torch.randn(3, 4)
    assert not torch.equal(one(x), two(x))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x), two(x))


def test_favor_stabiliser_survives_what_underflows_and_changes_nothing_after_sum_normalisation():
    torch.manual_seed(0)
    plain = fw.feature_map("favor", d_key=16, m=32).eval()
    stable = fw.feature_map("favor", d_key=16, m=32, stabilize=True).eval()
    stable.load_state_dict(plain.state_dict())
    x = torch.randn(10, 16)
    torch.testing.assert_close(fw.sum_normalize(stable(x)), fw.sum_normalize(plain(x)))
    far = 40 * torch.randn(10, 16)
    assert not plain(far).any()
    torch.testing.assert_close(fw.sum_normalize(stable(far)).sum(-1), torch.ones(10))


def test_l2_normalize_is_unit_length_at_any_scale():
    x = torch.randn(4, 6) * torch.tensor([1e-25, 1e-3, 1.0, 1e25])[:, None]
    torch.testing.assert_close(fw.l2_normalize(x).norm(dim=-1), torch.tensor([0.0, 1.0, 1.0, 1.0]))


def test_tables_have_one_line_for_each_entry():
    for table in (fw.list_rules(), fw.list_feature_maps(), fw.list_backends()):
        assert table
        assert all(name and line and "\n" not in line for name, line in table.items())


def test_gram_schmidt_is_the_orthogonal_factor():
    """As on a GPU: the same rows as those of a QR decomposition, up to their sign."""
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    rows = gram_schmidt(x)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(5, dtype=torch.float64).expand(3, 5, 5))
    q = torch.linalg.qr(x.mT)[0].mT
    torch.testing.assert_close(rows, q * (q * rows).sum(-1, keepdim=True).sign())
    assert ((rows * x).sum(-1) > 0).all()


@pytest.mark.parametrize(("name", "options"), ALL)
def test_scaled_features_are_the_features_times_a_positive_number_of_each_token(name, options):
    phi = fw.feature_map(name, d_key=6, **options).double().eval()
    x = torch.randn(5, 6, dtype=torch.float64)
    mapped, scaled = phi(x), phi.scaled(x)
    ratio = (scaled * mapped).sum(-1) / mapped.square().sum(-1)
    assert (ratio > 0).all()
    torch.testing.assert_close(scaled, ratio.unsqueeze(-1) * mapped)


@pytest.mark.parametrize("form", ["memory", "reading"])
def test_favor_reads_what_would_overflow(form):
    """Queries and keys along one long random row: phi(q)·phi(k) is past float32, what is read is not."""
    d, T = 64, 7
    if form == "memory":
        layer = fw.FastWeightAttention(d, 1, rule="sum", feature_map="favor", normalization="attention")
        projections = [layer.project]
    else:
        layer = FastWeightCrossAttention(d, 1, feature_map="favor")
        projections = [layer.query, layer.key_value]
    layer.eval()
    with torch.no_grad():
        layer.feature_map.projection[0] *= 12 / layer.feature_map.projection[0].norm()
        for part in projections:
            part.weight.copy_(torch.eye(d).repeat(len(part.weight) // d, 1))
    row = layer.feature_map.projection[0]
    x = (row + 0.1 * torch.randn(1, T, d)).requires_grad_()
    assert (layer.feature_map(x) @ layer.feature_map(x).mT).isinf().any()

    def attend(layer, x):
        return layer(x)[0] if form == "memory" else layer(x, layer.remember(x))

    y = attend(layer, x)
    exact_x = x.detach().double().requires_grad_()
    exact = attend(copy.deepcopy(layer).double(), exact_x)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)
    (grad,), (exact_grad,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(exact, exact_x, dy.double())
    assert (grad.double() - exact_grad).norm() < 1e-2 * exact_grad.norm()
