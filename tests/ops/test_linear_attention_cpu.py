"""Linear attention in C++ against all weights in plain PyTorch: every map, both orders of products, states, padding."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fastweights as fw
from fastweights.feature_maps import feature_map
from fastweights.ops.cpu import build
from fastweights.ops.cpu import linear_attention as cpu
from fastweights.ops.features import MapFeatures
from fastweights.ops.fused.features import vectors_of
from fastweights.ops.linear_attention import _plain, read_memory, write_memory
from fastweights.ops.normalization import smooth_l2_normalize, sum_normalize
from tests.ops.calls import gradients, relative_error

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

# Name -> map, its options, how features are normalised, and a scale of queries.
FEATURES = {
    "elu": ("elu", {}, None, 1.0),
    "relu, sum": ("relu", {}, sum_normalize, 0.5),
    "silu, smooth l2": ("silu", {}, smooth_l2_normalize, 0.5),
    "dpfp": ("dpfp", {"nu": 2}, None, 1.0),
    "favor": ("favor", {"m": 9, "scale": True}, None, 1.0),
    "favor, sum": ("favor", {"m": 5}, sum_normalize, 1.0),
}
# T, S, H, R and M: the first two by the weights, the others by the memory.
SIZES = [(3, 5, 2, 17, 33), (30, 31, 1, 64, 16), (40, 300, 2, 5, 3), (290, 33, 1, 20, 40)]


def random_call(name, sizes, dtype=torch.float64, masked=True):
    """q, k and v, a mask under which a sentence has no token, and features."""
    T, S, H, R, M = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = (3, T, H, R), (3, S, H, R), (3, S, H, M)
    # Of one sign, so that what the signed map reads is not divided by next to nothing.
    tensors = [torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    tensors[2] -= 0.5
    lengths = torch.tensor([S, 0, (S + 1) // 2])
    mask = torch.arange(S) < lengths[:, None] if masked else None
    map_name, options, norm, scale = FEATURES[name]
    torch.manual_seed(0)
    features = MapFeatures(feature_map(map_name, R, **options).double(), norm, scale=scale)
    return [x.requires_grad_() for x in tensors], mask, features


def fused(tensors, mask, features, normalization="attention"):
    assert cpu.refuses((*tensors, mask, vectors_of(features)), (features, True)) is None
    return fw.linear_attention(*tensors, mask, normalization=normalization, features=features)


def plain(tensors, mask, features, normalization="attention"):
    return _plain(*tensors, mask, vectors_of(features), features, normalization == "attention")[0]


def exact(tensors, *rest, **more):
    return plain([x.double() for x in tensors], *rest, **more)


WAYS = [fused, exact]


def everything(run, call, **more):
    y = run(*call, **more)
    return [y, *gradients([y], call[0])]


def check_state(call, tolerance, normalization="attention"):
    """A memory that is written once and read with a few queries at a time."""
    (q, k, v), mask, features = call
    want = exact(*call, normalization=normalization)
    with torch.no_grad():
        state = write_memory(k, v, mask, normalization=normalization, features=features)
        y = torch.cat([read_memory(part, state, features=features) for part in q.split(7, 1)], 1)
    assert relative_error([y], [want]) < tolerance


@pytest.mark.parametrize("normalization", ["attention", None])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_agrees_with_the_plain_one(name, sizes, normalization):
    call = random_call(name, sizes, masked=normalization is not None)
    found, want = (everything(run, call, normalization=normalization) for run in WAYS)
    assert relative_error(found, want) < 1e-12
    check_state(call, 1e-12, normalization)


@pytest.mark.parametrize("sizes", [(2, 3, 1, 2, 2), (9, 9, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", ["elu", "favor"])
def test_derivatives(name, sizes):
    tensors, mask, features = random_call(name, sizes)

    def function(*tensors):
        return fused(tensors, mask, features)

    assert gradcheck(function, tensors, check_batched_grad=True)
    assert gradgradcheck(function, tensors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("sizes", SIZES[1:3], ids=str)
def test_narrow_inputs_are_multiplied_in_float32(sizes, dtype, tolerance):
    """And heads that are parts of a projection, as in a layer."""
    (q, k, v), mask, features = random_call("elu", sizes, dtype)
    k, v = torch.cat([k, v], -1).detach().split([k.shape[3], v.shape[3]], -1)
    call = [x.detach().requires_grad_() for x in (q.mT.contiguous().mT, k, v)], mask, features
    found, want = (everything(run, call) for run in WAYS)
    assert [x.dtype for x in found] == [dtype] * 4
    assert relative_error(found, want) < tolerance


@pytest.mark.parametrize("sizes", SIZES[::2], ids=str)
def test_padding_may_be_anything(sizes):
    tensors, mask, features = random_call("elu", sizes)
    clean = everything(fused, (tensors, mask, features))
    with torch.no_grad():
        for x in tensors[1:]:
            x[~mask] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(everything(fused, (tensors, mask, features)), clean, strict=True))
    assert not clean[0][1].any() and not any(dx[1].any() for dx in clean[1:])


@pytest.mark.parametrize("sizes", SIZES[::2], ids=str)
def test_the_number_of_threads_changes_no_bit(sizes):
    call = random_call("dpfp", sizes, torch.float32)
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(everything(fused, call))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
