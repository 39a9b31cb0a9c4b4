"""Short convolution, gated norm and feature maps on a GPU: interpreted against float64, and compiled without a GPU."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

from fastweights.ops.features import Features
from fastweights.ops.fused.features import map_heads, plain_features
from fastweights.ops.fused.gated_norm import gated_rms_norm
from fastweights.ops.fused.short_convolution import short_convolution
from fastweights.ops.gpu.features import launch as features
from fastweights.ops.gpu.features import self_check as features_check
from fastweights.ops.gpu.gated_norm import launch as norm
from fastweights.ops.gpu.gated_norm import self_check as norm_check
from fastweights.ops.gpu.heads import readable
from fastweights.ops.gpu.short_convolution import launch as convolution
from fastweights.ops.gpu.short_convolution import self_check as convolution_check
from fastweights.ops.gpu.short_convolution.self_check import Kind
from tests.layers.kernels import fits, record
from tests.ops.calls import gradients, relative_error
from tests.ops.interpreted import inside, outside

pytest.importorskip("triton")

CPU, WIDE = torch.device("cpu"), torch.float64
KINDS = [
    Kind(WIDE, 4, True),
    Kind(WIDE, 4, True, bias=True, recent=True, packed=True, starts=True),
    Kind(WIDE, 2, False, bias=True, packed=True),
    Kind(WIDE, 3, False, recent=True, packed=True),
    Kind(WIDE, 5, True, bias=True, recent=True, starts=True),
    Kind(torch.float32, 4, True, recent=True),
]


def draw(*shape):
    return torch.randn(shape, dtype=WIDE, requires_grad=True)


@inside
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("T", [1, 37])
def test_convolutions(kind, T):
    limit = 1e-12 if kind.dtype == WIDE else 1e-6
    errors = convolution_check.compare(kind, CPU, 2, T, 13)
    assert all(error < limit for error in errors.values()), errors


@inside
@pytest.mark.parametrize("opening", [None, "silu", "sigmoid"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (2, 1, 2, 16), (1, 30, 2, 100)], ids=str)
def test_norms(opening, shape):
    errors = norm_check.compare(WIDE, opening, CPU, shape)
    assert all(error < 1e-12 for error in errors.values()), errors


FEATURES = {
    "l2": Features.named("none", l2=True, scale=0.3),
    "silu l2": Features.named("silu", l2=True, scale=0.3),
    "silu": Features.named("silu"),
    "elu sum": Features.named("elu", sum=True),
    "relu sum": Features.named("relu", sum=True, scale=2.0),
    "sum": Features.named("none", sum=True),
}


@inside
@pytest.mark.parametrize("phi", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (2, 1, 2, 16), (1, 30, 2, 100)], ids=str)
def test_features(phi, shape):
    errors = features_check.compare(phi, WIDE, WIDE, CPU, shape)
    assert len(errors) == 4 and all(error < 1e-12 for error in errors.values()), errors


@inside
def test_features_as_they_are_called():
    """For one of both, of more heads than keys have, in another dtype, with NaN where NaN came in, and derivatives."""
    q, k, phi = draw(2, 3, 4, 5), draw(2, 6, 2, 5), FEATURES["silu l2"]
    given, settings = (q, k, None), (phi, False, WIDE, False)
    assert features_check.refuses(given, settings) is None
    found, want = map_heads(q, k, phi, divided=False, dtype=WIDE), plain_features(*given, *settings)
    assert relative_error([*found, *gradients(found, [q, k])], [*want, *gradients(want, [q, k])]) < 1e-13
    assert torch.equal(map_heads(None, k, phi, divided=False, dtype=WIDE)[1], found[1])
    narrow = map_heads(q.float(), None, phi, divided=False, dtype=WIDE)[0]
    assert narrow.dtype == WIDE and relative_error([narrow], [found[0]]) < 1e-6
    spoilt = q.detach().clone()
    spoilt[1, 2, 3, 4] = float("nan")
    depends = (map_heads(spoilt, None, phi, divided=False, dtype=WIDE)[0] != found[0]).any(-1)
    assert depends.nonzero().tolist() == [[1, 2, 3]]
    assert gradcheck(lambda q: map_heads(q, None, phi, divided=False, dtype=WIDE)[0], draw(1, 2, 1, 3), fast_mode=True)
    zeros = torch.zeros(1, 1, 1, 4, dtype=WIDE, requires_grad=True)
    nothing, _ = map_heads(zeros, None, FEATURES["relu sum"], divided=False, dtype=WIDE)
    assert not nothing.any() and not torch.autograd.grad(nothing.sum(), zeros)[0].any()


@inside
@pytest.mark.parametrize(
    ("phi", "by_head", "reason"),
    [
        (Features.named("dpfp", 2), False, "not with 'dpfp'"),
        (Features.named("none", scale=0.5), False, "nothing to compute but a scale"),
        (FEATURES["l2"], True, "head by head"),
    ],
)
def test_features_that_go_to_plain_pytorch(phi, by_head, reason):
    assert reason in features_check.refuses((torch.ones(1, 2, 3, 4), None, None), (phi, False, WIDE, by_head))


@inside
def test_normalised_heads_of_one_entry_go_to_plain_pytorch():
    """Their gradient is 0, or a difference of which float32 keeps few digits: no check can pass."""
    one = (torch.ones(1, 2, 3, 1), None, None)
    assert "a head of one entry" in features_check.refuses(one, (FEATURES["l2"], False, WIDE, False))
    assert "a head of one entry" in features_check.refuses(one, (FEATURES["sum"], False, WIDE, False))
    assert features_check.refuses(one, (FEATURES["silu"], False, WIDE, False)) is None


@inside
def test_derivatives_of_the_convolution():
    bounds = torch.tensor([0, 1, 1, 3])
    tensors = [draw(1, 4, 1), draw(1, 2), draw(1), draw(3, 1, 1)]
    run = partial(short_convolution, silu=True, cu_seqlens=bounds)
    assert gradcheck(run, tensors, fast_mode=True)


@inside
def test_derivatives_of_the_norm():
    tensors = [draw(1, 2, 2, 3), draw(3), draw(1, 2, 2, 3)]
    assert gradcheck(lambda *tensors: gated_rms_norm(*tensors, opening="silu"), tensors, fast_mode=True)


@inside
def test_segments_are_the_whole():
    tensors = [draw(1, 6, 5), draw(5, 4), draw(5), draw(1, 3, 5)]
    x, weight, bias, recent = tensors
    whole = short_convolution(*tensors, silu=True)
    whole = [*whole, *gradients(whole, tensors)]
    for cuts in ([0, 1, 6], range(7)):
        ys, state = [], recent
        for first, last in pairwise(cuts):
            y, state = short_convolution(x[:, first:last], weight, bias, state, silu=True)
            ys.append(y)
        found = [torch.cat(ys, 1), state]
        assert relative_error([*found, *gradients(found, tensors)], whole) < 1e-13


@inside
def test_nan_stays_in_its_text():
    """Between tokens of packed sequences and texts, in what is carried in, and after the last bound."""
    bounds, starts = torch.tensor([0, 10, 10, 14, 20]), torch.arange(23).expand(1, 23) == 4
    tensors = [draw(1, 23, 3), draw(3, 4), draw(3), draw(4, 3, 3)]
    weights = [torch.randn(1, 23, 3, dtype=WIDE), torch.randn(4, 3, 3, dtype=WIDE)]

    def run():
        found = short_convolution(*tensors, silu=True, cu_seqlens=bounds, starts=starts)
        return [*found, *torch.autograd.grad(found, tensors, weights)]

    clean = run()
    with torch.no_grad():
        tensors[0][0, 20:] = weights[0][0, 20:] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(clean, run(), strict=True))
    with torch.no_grad():
        # The second half of the first sequence, all of the third, and what is carried into the first.
        tensors[0][0, 6] = tensors[0][0, 11] = weights[0][0, 13] = float("nan")
        tensors[3][0, 2] = weights[1][2, 1] = float("nan")
    y, recent_end, dx, _, _, d_recent = run()
    spoilt = torch.zeros(23, dtype=torch.bool)
    spoilt[[*range(3), *range(6, 10), *range(11, 14)]] = True
    assert torch.equal((y != clean[0]).any(-1)[0], spoilt)
    kept = torch.ones(23, dtype=torch.bool)
    kept[[*range(3), *range(4, 14)]] = False
    assert torch.equal(dx[0, kept], clean[2][0, kept])
    assert torch.equal(recent_end[[1, 3]], clean[1][[1, 3]]) and torch.equal(d_recent[[1, 3]], clean[5][[1, 3]])


def test_parts_of_a_projection_are_read_where_they_are():
    for T in (1, 6):
        for part in torch.randn(2, T, 40)[:, :, 4:].split([8, 8, 20], -1):
            assert convolution._readable(part) is part
            assert readable(heads := part.unflatten(-1, (2, -1))) is heads
    segment = torch.randn(2, 9, 40)[:, 3:7]
    assert convolution._readable(segment) is segment
    for awkward in (torch.randn(2, 40, 9).mT, torch.randn(9, 2, 40)[:, :, ::2], torch.randn(2, 1, 40).expand(2, 9, 40)):
        assert torch.equal(convolution._readable(awkward), awkward)
        assert convolution._readable(awkward).is_contiguous()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"mask": torch.ones(2, 9, dtype=torch.bool)}, "across padding"),
        ({"weight": torch.ones(5, 9)}, "up to 8 taps in registers, got 9"),
        ({"x": torch.ones(2, 0, 5)}, "no tokens"),
        ({"x": torch.ones(2, 9, 5, dtype=torch.bfloat16)}, "not torch.bfloat16"),
        ({"bias": torch.ones(5, device="meta")}, "another tensor on meta"),
    ],
)
@inside
def test_what_goes_to_plain_pytorch(wrong, reason):
    given = {"x": torch.ones(2, 9, 5), "weight": torch.ones(5, 4), "bias": None, "recent": None, "mask": None}
    tensors = [*{**given, **wrong}.values(), None, None]
    assert reason in convolution_check.refuses(tensors, (True,))


@pytest.mark.slow
@outside
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(monkeypatch, capability):
    """One launch forward, two back: a layer's call, and for Hopper one with everything that a call can have."""
    from fastweights.ops.gpu import common, launcher
    from fastweights.ops.gpu.features import kernels as maps
    from fastweights.ops.gpu.gated_norm import kernels as norms
    from fastweights.ops.gpu.short_convolution import kernels as convolutions

    monkeypatch.setattr(launcher, "_planned", {})
    convolved = record(monkeypatch, convolutions, "convolve", "convolve_gradients")
    normalized = record(monkeypatch, norms, "normalize", "normalize_gradients")
    mapped = record(monkeypatch, maps, "map_heads", "map_heads_gradients")
    added = record(monkeypatch, common, "add_parts")

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight = tensor(1, 4096, 3072), tensor(3072, 4, dtype=torch.float32)
    tensors, ends = [x, weight, *[None] * 5], None
    if capability == 90:
        marks = None, tensor(9, dtype=torch.int32), tensor(1, 4096, dtype=torch.bool)
        tensors, ends = [x, weight, tensor(3072), tensor(8, 3, 3072), *marks], tensor(8, 3, 3072)
    convolution.forward(tensors, (True,))
    fits(convolved, 1, capability)
    convolved.clear()
    convolution.backward([x, ends], tensors, (True,))
    heads, settings = [tensor(8, 2048, 16, 128), tensor(128), tensor(8, 2048, 16, 128)], ("silu", 1e-5, 1.0)
    norm.backward(norm.forward(heads, settings), heads, settings)
    given, settings = [heads[0], heads[0], None], (FEATURES["silu l2"], False, torch.bfloat16, False)
    features.backward(features.forward(given, settings), given, settings)
    for calls, count in ((convolved, 1), (normalized, 2), (mapped, 4), (added, 2)):
        fits(calls, count, capability)
