"""The feed-forward kernels: in Triton's interpreter against plain PyTorch, and compiled without a GPU."""

import pytest
import torch

from fastweights.layers import feedforward
from fastweights.layers.feedforward import FeedForward
from fastweights.ops.gpu import device
from fastweights.ops.gpu.feedforward import launch
from fastweights.ops.gpu.feedforward.launch import TILES
from fastweights.ops.gpu.feedforward.operators import new_seed, output_and_middle
from fastweights.ops.gpu.feedforward.self_check import compare, refuses
from tests.layers.kernels import fits, record
from tests.ops.interpreted import INTERPRETED, inside, outside

pytest.importorskip("triton")

CPU = torch.device("cpu")


@inside
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("d_model", "d_ff", "tokens"), [(16, 40, 37), (20, 270, 3), (3, 16, 200), (200, 64, 5)])
def test_output_and_gradients(d_model, d_ff, tokens, p):
    errors = compare(torch.float64, d_model, d_ff, CPU, tokens, p)
    # Biases stay in float32.
    assert errors.pop("b1") < 1e-6 and errors.pop("dropped") < 4e-3
    assert all(error < 1e-12 for error in errors.values()), errors


def layers(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    fused, dense = (FeedForward(6, 10, dropout, backend=backend).to(dtype) for backend in ("fused", "dense"))
    dense.load_state_dict(fused.state_dict())
    return fused, dense


@inside
def test_the_layer_takes_it():
    fused, dense = layers(dropout=0.3)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    before = torch.get_rng_state()
    torch.testing.assert_close(fused.eval()(x), dense.eval()(x))
    assert torch.equal(torch.get_rng_state(), before)
    fused.train()
    assert not torch.equal(fused(x), fused(x))
    torch.manual_seed(4)
    first = fused(x)
    torch.manual_seed(4)
    assert torch.equal(fused(x), first)


@inside
def test_a_bias_with_any_stride():
    x, w1, bias, w2 = torch.randn(2, 3), torch.randn(5, 3), torch.randn(10)[::2], torch.randn(3, 5)
    y, _ = launch.forward(x, w1, bias, w2, new_seed(CPU), 0.0)
    torch.testing.assert_close(y, (x @ w1.mT + bias).relu() @ w2.mT)


@pytest.mark.parametrize("number", range(5))
def test_layers_that_were_replaced_or_are_watched(monkeypatch, number):
    monkeypatch.setattr(feedforward, "refuses", lambda *_: None)
    monkeypatch.setattr(feedforward, "fused_feedforward", None)
    layer, x = FeedForward(6, 10).eval(), torch.randn(2, 5, 6)
    seen = []
    with layer[number].register_forward_hook(lambda *_: seen.append(number)):
        layer(x)
        layer.backend = "fused"
        with pytest.raises(ValueError, match="is 'fused', but one of its layers has hooks"):
            layer(x)
    own = layer[number].forward
    layer[number].forward = lambda x: own(x).tanh()
    tanh = torch.nn.Sequential(layer[number], torch.nn.Tanh())
    for _ in range(2):
        with pytest.raises(ValueError, match="is 'fused', but one of its layers was replaced"):
            layer(x)
        layer.backend = "auto"
        torch.testing.assert_close(layer(x), torch.nn.Sequential(*layer)(x))
        layer[number], layer.backend = tanh, "fused"
    assert seen == [number]


@inside
def test_gradcheck():
    fused, _ = layers()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    parameters = dict(fused.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(fused, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters.values()), fast_mode=True)


@inside
def test_what_is_dropped_looks_random():
    """Each entry as often as any other, and no two tokens, entries or draws alike."""
    n, F, p, draws = 130, 70, 0.25, 12
    x, w1, b1, w2 = torch.zeros(n, 16), torch.zeros(F, 16), torch.ones(F), torch.zeros(16, F)
    masks = torch.stack([launch.forward(x, w1, b1, w2, new_seed(CPU), p)[1] == 0 for _ in range(draws)])
    masks = (masks.double() - p) / (p * (1 - p)) ** 0.5
    for means in (masks.mean((1, 2)) * (n * F) ** 0.5, masks.mean((0, 1)) * (n * draws) ** 0.5, masks.mean() * 330):
        assert means.abs().max() < 4
    for a, b in ((masks[:, 1:], masks[:, :-1]), (masks[..., 1:], masks[..., :-1]), (masks[1:], masks[:-1])):
        product = a * b
        assert abs(product.mean()) * product.numel() ** 0.5 < 4


def test_the_check_measures_what_is_dropped_in_standard_deviations(monkeypatch):
    """Where all is dropped, off by (1 - p) / sqrt(p (1 - p) / n): four times as much for p = 0.2 as for 0.8."""
    monkeypatch.setattr(launch, "forward", lambda x, w1, *_: (x, x.new_zeros(len(x), len(w1))))
    monkeypatch.setattr(launch, "backward", lambda dy, x, w1, w2, *_: (x, w1, w1[:, 0], w2))
    few, many = (compare(torch.float64, 6, 10, CPU, 20, p)["dropped"] for p in (0.2, 0.8))
    assert few == pytest.approx(4 * many)


@inside
def test_nan_stays():
    fused, _ = layers()
    assert fused(torch.full((2, 6), float("nan"), dtype=torch.float64)).isnan().all()


@inside
def test_as_a_custom_op():
    torch.use_deterministic_algorithms(False)
    x, w1, b1, w2 = (torch.randn(s, requires_grad=True) for s in ((5, 6), (9, 6), (9,), (6, 9)))
    torch.library.opcheck(output_and_middle, (x, w1, b1, w2, new_seed(CPU), 0.0))


@inside
def test_compiles_without_graph_breaks():
    torch.use_deterministic_algorithms(False)
    fused, dense = layers()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    ours, theirs = (torch.autograd.grad(f(x).square().sum(), [x, *f.parameters()]) for f in (compiled, dense))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu():
    fused, dense = layers()
    x = torch.randn(2, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="'fused', but there is no CUDA device"):
        fused(x)
    fused.backend = "auto"
    torch.testing.assert_close(fused(x), dense(x))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        FeedForward(6, 10, backend="fast")


def test_refusals(monkeypatch):
    monkeypatch.setattr(device, "unavailable", lambda: None)
    monkeypatch.setattr(device, "interpreted", lambda: True)
    assert "d_model may be up to 256, got 300" in refuses(torch.zeros(2, 300), 10, 0.1)
    assert "more than can be numbered" in refuses(torch.zeros(2**20, 1), 2048, 0.1)


@pytest.mark.slow
@outside
@pytest.mark.parametrize("d", [*TILES, 100])
def test_compiles_for_hopper(monkeypatch, d):
    from fastweights.ops.gpu.feedforward import kernels

    calls = record(monkeypatch, kernels, "widen", "widen_gradient")
    n, F = 24_576, 2048
    x, w1, w2 = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((n, d), (F, d), (d, F)))
    bias, seed = torch.empty(F, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    y, middle = launch.forward(x, w1, bias, w2, seed, 0.1)
    launch.backward(y, x, w1, w2, middle, 0.1)
    fits(calls, 2)
