"""The softmax kernels: in Triton's interpreter against the dense path and torch's own, and compiled without a GPU."""

import pytest
import torch

from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.ops.gpu.adaptive_softmax import launch
from fastweights.ops.gpu.adaptive_softmax.operators import nll_and_kept
from fastweights.ops.gpu.adaptive_softmax.self_check import compare, refuses
from fastweights.ops.gpu.adaptive_softmax.variants import TABLE, Config, configuration
from tests.layers.kernels import fits, record
from tests.ops.interpreted import INTERPRETED, inside, outside

pytest.importorskip("triton")

CPU, V, D, CUTOFFS = torch.device("cpu"), 23, 3, (4, 9, 17)
# Tiles so small that a few tokens fill more than one, and a softmax of a few rows is split.
SMALL = Config(4, 8, 4, 1, 8, 4, 4, 1, parts=4, least=8)


def agree(dtype=torch.float64, d=D, tokens=6, words=V, cutoffs=CUTOFFS, targets=None, config=SMALL):
    errors = compare(dtype, dtype, d, CPU, tokens, words, cutoffs, targets, config)
    assert all(error < (1e-12 if dtype == torch.float64 else 1e-5) for error in errors.values()), errors


@inside
@pytest.mark.parametrize("cutoffs", [CUTOFFS, (), (1, 2, 22)], ids=str)
def test_softmaxes(cutoffs):
    agree(cutoffs=cutoffs)


@inside
@pytest.mark.parametrize("d", [1, 16, 33])
def test_sizes(d):
    agree(d=d, tokens=3)


@inside
@pytest.mark.parametrize("tokens", [1, 4])
def test_tokens(tokens):
    agree(tokens=tokens)


@inside
@pytest.mark.parametrize(
    "words",
    [range(4), range(9, 17), range(17, 23), [0, 3, 4, 8, 9, 16, 17, 22], [12], [22]],
    ids=["head", "largest", "last", "borders", "one word", "last word"],
)
def test_wherever_the_targets_fall(words):
    targets = torch.tensor([words[i % len(words)] for i in range(9)])
    agree(tokens=9, targets=targets[torch.randperm(9)])


@inside
@pytest.mark.parametrize("parts", [1, 64])
def test_parts(parts):
    """Results do not depend on how a softmax is split, nor on tokens that come in many tiles."""
    agree(tokens=9, words=40, cutoffs=(12, 20), config=SMALL._replace(parts=parts))


@inside
def test_as_shipped_for_float32():
    agree(torch.float32, d=20, tokens=20, words=80, config=configuration(torch.float32, 20))


def layer_of(backend, dtype=torch.float64):
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(V, D, CUTOFFS, backend=backend).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@inside
def test_gradcheck():
    layer, hidden = layer_of("fused"), torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 4, 10, 22])
    parameters = dict(layer.named_parameters())

    def loss(hidden, cluster_weight, bias):
        replaced = parameters | {"cluster_weight": cluster_weight, "bias": bias}
        return torch.func.functional_call(layer, replaced, (hidden, targets))

    checked = (hidden, layer.cluster_weight, layer.bias)
    assert torch.autograd.gradcheck(loss, checked, fast_mode=True)


@inside
def test_the_layer_takes_it():
    dense, fused = layer_of("dense"), layer_of("fused")
    hidden, targets = torch.randn(2, 3, D, dtype=torch.float64), torch.randint(V, (2, 3))
    torch.testing.assert_close(fused(hidden, targets), dense(hidden, targets))
    with torch.no_grad():
        torch.testing.assert_close(fused(hidden, targets), dense(hidden, targets))
    full = -fused.log_prob(hidden).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(fused(hidden, targets), full)


@inside
def test_no_word_no_number():
    layer = layer_of("fused")
    nll = layer(torch.randn(4, D, dtype=torch.float64), torch.tensor([3, -1, V, 22]))
    assert nll.isnan().tolist() == [False, True, True, False]


@inside
def test_very_large_logits():
    """No overflow where every probability is 0 or 1."""
    layer = layer_of("fused", torch.float32)
    with torch.no_grad():
        layer.weight.mul_(1e4)
        hidden, targets = torch.randn(9, D), torch.randint(V, (9,))
        layer.backend, fused = "dense", layer(hidden, targets)
        # Logits of 1e4 have three digits behind the point in float32.
        torch.testing.assert_close(fused, layer(hidden, targets), rtol=1e-6, atol=2e-3)


@inside
def test_as_a_custom_op():
    torch.use_deterministic_algorithms(False)
    layer, hidden = layer_of("fused"), torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    weights = [layer.weight, layer.bias, layer.cluster_weight, layer.cluster_bias]
    arguments = (hidden, weights, torch.tensor([0, 3, 4, 10, 22]), list(CUTOFFS), True)
    torch.library.opcheck(nll_and_kept, (*arguments, list(configuration(torch.float64, D))))


@inside
def test_compiles_without_graph_breaks():
    torch.use_deterministic_algorithms(False)
    layer, hidden = layer_of("fused"), torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(V, (5,))
    leaves = [hidden, *layer.parameters()]
    losses = [run(hidden, targets) for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))]
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in losses), strict=True):
        torch.testing.assert_close(ours, theirs)


@inside
def test_refuses_what_the_interpreter_gets_wrong():
    hidden, weight = torch.zeros(2, D), torch.zeros(V, D)
    assert refuses(hidden, weight) is None
    assert "not torch.bfloat16" in refuses(hidden.bfloat16(), weight)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu():
    hidden, targets = torch.randn(2, D, dtype=torch.float64), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="'fused', but there is no CUDA device"):
        layer_of("fused")(hidden, targets)
    torch.testing.assert_close(layer_of("auto")(hidden, targets), layer_of("dense")(hidden, targets))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        AdaptiveSoftmax(V, D, backend="fast")


ROWS = [
    pytest.param(dtype, d, config, id=f"{str(dtype)[6:]}-{d}")
    for dtype, rows in TABLE.items()
    if dtype != torch.float64
    for d, config in rows.items()
]


@pytest.mark.slow
@outside
@pytest.mark.parametrize(("dtype", "d", "config"), ROWS)
def test_compiles_for_hopper(monkeypatch, dtype, d, config):
    """For the paper's vocabulary and batch."""
    from fastweights.ops.gpu.adaptive_softmax import kernels

    calls = record(monkeypatch, kernels, "sort_tokens", "partial_softmax", "join_parts", "weight_gradient")

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    N, words, cutoffs = 24_576, 267_735, [20_000, 40_000, 200_000]
    weights = tensor(words, d), tensor(words), tensor(3, d), tensor(3)
    _, kept = launch.forward(tensor(N, d, dtype=dtype), weights, tensor(N, dtype=torch.int64), cutoffs, True, config)
    launch.backward(tensor(N), kept, cutoffs, torch.float32, config)
    fits(calls, 4)
