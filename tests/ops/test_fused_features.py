"""Maps of queries and keys in C++ against the plain ones: values, derivatives, strides, NaN, threads."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fastweights.feature_maps import feature_map
from fastweights.ops.cpu import build
from fastweights.ops.cpu import features as cpu
from fastweights.ops.features import Drawn, Features, MapFeatures
from fastweights.ops.fused.features import map_heads, plain_features, vectors_of
from fastweights.ops.normalization import l2_normalize, smooth_l2_normalize, sum_normalize
from tests.ops.calls import gradients, relative_error

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

MAPS = {"none": {}, "elu": {}, "relu": {}, "silu": {}, "dpfp": {"nu": 3}, "favor": {"m": 5}}
NORMS = [None, sum_normalize, smooth_l2_normalize, l2_normalize]


def make(name, norm, R, scale=0.7):
    if name == "none":
        return Features("none", sum=norm is sum_normalize, l2=norm is smooth_l2_normalize, scale=scale)
    torch.manual_seed(0)
    return MapFeatures(feature_map(name, R, **MAPS[name]).double(), norm, scale=scale)


def heads(R, dtype=torch.float64, T=5, S=8):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 3, R, generator=generator, dtype=torch.float64).to(dtype) for n in (T, S))
    return [q.requires_grad_(), k.requires_grad_()]


def everything(run, tensors, *settings):
    outputs = run(*tensors, *settings)
    return [*outputs, *gradients(outputs, tensors)]


def fused(q, k, features, divided, dtype, by_head):
    return map_heads(q, k, features, divided=divided, dtype=dtype, by_head=by_head)


def plain(q, k, features, *settings):
    return plain_features(q, k, vectors_of(features), features, *settings)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("R", [5, 16, 37])
def test_agrees_with_the_plain_one(name, norm, R):
    features, tensors = make(name, norm, R), heads(R)
    idle = name == "none" and norm in (None, l2_normalize)
    assert cpu.refuses(tensors, (features,)) == ("there is nothing to compute" if idle else None)
    for by_head in (False, True):
        # Queries that are divided may be scaled, and only FAVOR+ makes use of that.
        settings = features, by_head, torch.float64, by_head
        found = everything(fused, tensors, *settings)
        assert relative_error(found, everything(plain, tensors, *settings)) < 1e-11
        assert idle or found[0].transpose(1, 2).is_contiguous() == by_head


@pytest.mark.parametrize(
    ("name", "norm"), [("elu", sum_normalize), ("silu", l2_normalize), ("dpfp", smooth_l2_normalize), ("favor", None)]
)
def test_derivatives(name, norm):
    features = make(name, norm, 3)

    def function(q, k):
        return map_heads(q, k, features, divided=False, dtype=torch.float64)

    tensors = [x[:1, :2] for x in heads(3)]
    assert gradcheck(function, tensors, check_batched_grad=True)
    assert gradgradcheck(function, tensors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("name", ["elu", "dpfp"])
def test_narrow_inputs_of_any_strides(name, dtype, tolerance):
    """Heads that are parts of a projection, to be had in their own dtype or in float32."""
    features = make(name, sum_normalize, 16)
    wide = torch.randn(2, 40, 2 * 48 + 7).to(dtype)
    q, k = (x.unflatten(-1, (3, 16)) for x in wide.split([48, 7, 48], -1)[::2])
    exact = plain(q.double(), k.double(), features, False, torch.float64, False)
    for out in (dtype, torch.float32):
        for x, y in zip(map_heads(q, k.mT.contiguous().mT, features, divided=False, dtype=out), exact, strict=True):
            assert x.dtype == out and (x - y).norm() < (tolerance if out == dtype else 1e-6) * y.norm()


def test_other_vectors_drawn_between_both_passes():
    features, (q, _) = make("favor", None, 5), heads(5)
    settings = {"divided": False, "dtype": torch.float64}
    phi, _ = map_heads(q, None, features, **settings)
    (want,) = torch.autograd.grad(features.queries(q, False).square().sum(), q)
    features.phi.redraw()
    for twice in (False, True):
        found = torch.autograd.grad(phi.square().sum(), q, retain_graph=True, create_graph=twice)
        assert relative_error(found, [want]) < 1e-12


def test_vectors_of_any_strides():
    (q, _), vectors = heads(64), torch.randn(64, 200, dtype=torch.float64).mT
    for given in (vectors, torch.randn(200, 70, dtype=torch.float64)[:, :64]):
        features = MapFeatures(Drawn(given, 1.0))
        phi, _ = map_heads(q, None, features, divided=False, dtype=torch.float64)
        assert relative_error([phi], [features.queries(q, False)]) < 1e-11


def test_one_of_both_and_one_gradient_of_two():
    features, (q, k) = make("elu", sum_normalize, 5), heads(5)
    settings = {"divided": False, "dtype": torch.float64}
    phi_q, phi_k = map_heads(q, k, features, **settings)
    assert torch.equal(map_heads(q, None, features, **settings)[0], phi_q)
    assert torch.equal(map_heads(None, k, features, **settings)[1], phi_k)
    dk, dq = torch.autograd.grad(phi_k.square().sum(), (k, q), allow_unused=True)
    (want,) = torch.autograd.grad(features.keys(k).square().sum(), k)
    assert dq is None and relative_error([dk], [want]) < 1e-13


@pytest.mark.parametrize("size", [0, 1e-30, 1e-15, 1e15, 1e30])
def test_lengths_whose_squares_have_no_room(size):
    x = (size * torch.randn(1, 2, 2, 9)).requires_grad_()
    run = (x, None, MapFeatures(feature_map("silu", 9), l2_normalize), False, torch.float32, False)
    ours, theirs = fused(*run)[0], plain(*run)[0]
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(x.shape) * size
    (dx,), (want,) = (torch.autograd.grad(y, x, weights) for y in (ours, theirs))
    torch.testing.assert_close(dx, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MAPS)
def test_nan_stays_with_its_head_and_token(name):
    features, tensors = make(name, sum_normalize, 5), heads(5)
    settings = features, False, torch.float64, False
    clean = everything(fused, tensors, *settings)
    with torch.no_grad():
        tensors[0][1, 2, 1, 0] = float("nan")
    spoilt = everything(fused, tensors, *settings)
    for a, b, whose in zip(clean, spoilt, (0, 1, 0, 1), strict=True):
        depends = torch.zeros(a.shape[:3], dtype=torch.bool)
        depends[1, 2, 1] = whose == 0
        assert torch.equal((a != b).any(-1), depends)


def test_the_number_of_threads_changes_no_bit():
    features, tensors = make("dpfp", sum_normalize, 20), heads(20, torch.float32, T=90, S=33)
    results = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        results.append(everything(fused, tensors, features, False, torch.float32, False))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_maps_that_it_does_not_know_are_plain():
    features, tensors = MapFeatures(feature_map("tanh", 4), sum_normalize), heads(4)
    assert "does not know this feature map" in cpu.refuses(tensors, (features,))
    settings = features, False, torch.float64, False
    assert relative_error(fused(*tensors, *settings), plain(*tensors, *settings)) == 0
