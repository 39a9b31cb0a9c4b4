"""`AdaptiveSoftmax` against torch's own, against the full distribution, and within its room."""

import math

import pytest
import torch
from torch.nn import functional as F

from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.ops.losses import adaptive_softmax, kept_softmax
from tests.ops.calls import relative_error

V, D, CUTOFFS = 31, 6, (7, 12, 25)


def make(cutoffs=CUTOFFS, dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(V, D, cutoffs, **options).to(dtype)
    for parameter in layer.parameters():  # As large as the data, so that a missing one shows.
        torch.nn.init.normal_(parameter)
    return layer


def tokens(*shape, dtype=torch.float64):
    hidden = torch.randn(*shape, D, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, torch.randint(V, shape)


def with_gradients(loss, hidden, layer):
    weights = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss, *torch.autograd.grad((loss * weights).sum(), [hidden, *layer.parameters()])]


def test_equals_torch():
    layer, (hidden, targets) = make(), tokens(50)
    oracle = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, list(CUTOFFS), div_value=1.0, head_bias=True).double()
    size = CUTOFFS[0]
    with torch.no_grad():
        layer.bias[size:] = 0  # torch has biases in the head alone
        oracle.head.weight.copy_(torch.cat([layer.weight[:size], layer.cluster_weight]))
        oracle.head.bias.copy_(torch.cat([layer.bias[:size], layer.cluster_bias]))
        for tail, low, high in zip(oracle.tail, CUTOFFS, (*CUTOFFS[1:], V), strict=True):
            tail[0].weight.copy_(torch.eye(D))
            tail[1].weight.copy_(layer.weight[low:high])
    nll = layer(hidden, targets)
    torch.testing.assert_close(nll, -oracle(hidden, targets).output)
    torch.testing.assert_close(layer.log_prob(hidden), oracle.log_prob(hidden))

    found = torch.autograd.grad(nll.sum(), [hidden, *layer.parameters()])
    d_hidden, d_weight, d_bias, d_cluster_weight, d_cluster_bias = found
    loss = -oracle(hidden, targets).output.sum()
    tails = [tail[1].weight for tail in oracle.tail]
    expected = torch.autograd.grad(loss, [hidden, oracle.head.weight, oracle.head.bias, *tails])
    assert relative_error([d_hidden], [expected[0]]) < 1e-12
    assert relative_error([torch.cat([d_weight[:size], d_cluster_weight])], [expected[1]]) < 1e-12
    assert relative_error([torch.cat([d_bias[:size], d_cluster_bias])], [expected[2]]) < 1e-12
    assert relative_error([d_weight[size:]], [torch.cat(expected[3:])]) < 1e-12


def test_predictions_keep_to_their_room(monkeypatch):
    layer, (hidden, _) = make(tile_bytes=4 * V * 3, dtype=torch.float32), tokens(50, dtype=torch.float32)
    full, rows = layer.log_prob, []
    monkeypatch.setattr(layer, "log_prob", lambda part: rows.append(len(part)) or full(part))
    assert torch.equal(layer.predict(hidden), full(hidden).argmax(-1))
    # All but the last fill the room for float32 logits of three tokens.
    assert len(rows) > 2 and set(rows[:-1]) == {3} and rows[-1] <= 3


@pytest.mark.parametrize("tile_bytes", [1, 300, 2**20])
@pytest.mark.parametrize("cutoffs", [CUTOFFS, (7,), ()], ids=str)
def test_picks_from_the_full_distribution(cutoffs, tile_bytes):
    layer, (hidden, targets) = make(cutoffs, tile_bytes=tile_bytes), tokens(3, 11)
    full = layer.log_prob(hidden)
    torch.testing.assert_close(full.exp().sum(-1), torch.ones(3, 11, dtype=torch.float64))
    picked = -full.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    expected = with_gradients(picked, hidden, layer)
    assert relative_error(with_gradients(layer(hidden, targets), hidden, layer), expected) < 1e-12


def test_without_cutoffs_it_is_the_softmax():
    layer, (hidden, targets) = make(()), tokens(40)
    logits = F.linear(hidden, layer.weight, layer.bias)
    expected = with_gradients(F.cross_entropy(logits, targets, reduction="none"), hidden, layer)
    assert relative_error(with_gradients(layer(hidden, targets), hidden, layer), expected) < 1e-12
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("words", [range(7), range(25, 31), [0, 30]], ids=str)
def test_targets_of_some_clusters_only(words):
    layer, (hidden, _) = make(), tokens(20)
    targets = torch.tensor([words[i % len(words)] for i in range(20)])
    picked = -layer.log_prob(hidden).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    expected = with_gradients(picked, hidden, layer)
    assert relative_error(with_gradients(layer(hidden, targets), hidden, layer), expected) < 1e-12


def test_gradcheck():
    layer, (hidden, targets) = make(tile_bytes=200), tokens(2, 6)
    parameters = dict(layer.named_parameters())

    def loss(hidden, *values):
        replaced = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(layer, replaced, (hidden, targets))

    assert torch.autograd.gradcheck(loss, (hidden, *parameters.values()))


@pytest.mark.parametrize(
    ("dtype", "module", "name", "kept_bytes"),
    [(torch.bfloat16, adaptive_softmax, "logits_of", 0), (torch.float32, kept_softmax, "_softmax", 500)],
)
def test_logits_stay_within_the_room(monkeypatch, dtype, module, name, kept_bytes):
    """Those that are kept, too; the others are made again."""
    made, honest = [], getattr(module, name)

    def watched(*arguments):
        found = honest(*arguments)
        # Probabilities come with their losses.
        made.append(found[0] if isinstance(found, tuple) else found)
        return found

    monkeypatch.setattr(module, name, watched)
    layer, (hidden, targets) = make(tile_bytes=500, dtype=dtype), tokens(200, dtype=dtype)
    kept = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x)
    with hooks:
        loss = layer(hidden, targets)
    loss.sum().backward()
    assert max(tile.nbytes for tile in made) <= 500
    again = [tile for tile in made if tile.data_ptr() in kept]
    assert bool(again) == bool(kept_bytes) and sum(tile.nbytes for tile in again) <= kept_bytes
    assert sum(map(len, made)) + sum(map(len, again)) == 2 * (200 + int((targets >= CUTOFFS[0]).sum()))
    inputs = [hidden, targets, *layer.parameters()]
    assert sum(x.nbytes for x in kept.values()) <= sum(x.nbytes for x in inputs) + 2 * 200 * 4 + kept_bytes


def test_16_bit_sums_are_made_in_float32():
    layer = AdaptiveSoftmax(4096, D).bfloat16()
    nll = layer(torch.zeros(3, D, dtype=torch.bfloat16), torch.tensor([0, 17, 4095]))
    torch.testing.assert_close(nll, torch.full((3,), math.log(4096)))
    layer, (hidden, targets) = make(dtype=torch.bfloat16), tokens(64, dtype=torch.bfloat16)
    found = with_gradients(layer(hidden, targets), hidden, layer)
    assert [x.dtype for x in found] == [torch.float32, *[torch.bfloat16] * 5]
    assert relative_error([layer.log_prob(hidden).gather(-1, targets.unsqueeze(-1))], [-found[0].unsqueeze(-1)]) < 1e-6
    exact, wide = make(), hidden.detach().double().requires_grad_()
    exact.load_state_dict(layer.state_dict())
    assert relative_error([x.double() for x in found], with_gradients(exact(wide, targets), wide, exact)) < 0.02


def test_autocast():
    layer, (hidden, targets) = make(dtype=torch.float32), tokens(64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(layer(hidden, targets), hidden, layer)
        assert layer.log_prob(hidden).dtype == torch.float32
    assert {x.dtype for x in found} == {torch.float32}
    assert relative_error(found, with_gradients(layer(hidden, targets), hidden, layer)) < 0.02


def test_predict_and_sample():
    layer, (hidden, _) = make(tile_bytes=600), tokens(5, 40)
    p = layer.log_prob(hidden).exp().detach()
    assert torch.equal(layer.predict(hidden), p.argmax(-1))
    assert (layer.predict(hidden) >= CUTOFFS[0]).any()
    # Where no row prefers a cluster, or there is none.
    in_head = p.argmax(-1) < CUTOFFS[0]
    assert torch.equal(layer.predict(hidden[in_head][:1]), p[in_head][:1].argmax(-1))
    plain = AdaptiveSoftmax(V, D)
    assert torch.equal(plain.predict(hidden.float()), plain.log_prob(hidden.float()).argmax(-1))
    draws = layer.sample(hidden[0, 0].expand(20_000, D), torch.Generator().manual_seed(1))
    frequency = torch.bincount(draws, minlength=V) / 20_000
    assert ((frequency - p[0, 0]).abs() < 5 * (p[0, 0] / 20_000).sqrt() + 1e-4).all()
    again = [layer.sample(hidden, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*again) and again[0].shape == (5, 40)


def test_is_an_operator():
    layer, (hidden, targets) = make(dtype=torch.float32), tokens(9, dtype=torch.float32)
    parameters = [layer.weight, layer.bias, layer.cluster_weight, layer.cluster_bias]
    arguments = (hidden, parameters, targets, [*CUTOFFS], 100)
    torch.library.opcheck(torch.ops.fastweights.adaptive_nll.default, arguments)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = with_gradients(layer(hidden, targets), hidden, layer)
    assert relative_error(with_gradients(compiled(hidden, targets), hidden, layer), expected) < 1e-6


def test_errors():
    layer, (hidden, targets) = make(), tokens(4)
    with pytest.raises(ValueError, match=r"hidden must have shape \(..., d_model = 6\), got \(4, 5\)"):
        layer(hidden[:, :5], targets)
    with pytest.raises(ValueError, match=r"targets must have shape \(4,\) to go with hidden \(4, 6\), got \(3,\)"):
        layer(hidden, targets[:3])
    with pytest.raises(TypeError, match=r"int64 word numbers, got torch\.int32"):
        layer(hidden, targets.int())
    for wrong, found in ((31, "0 to 31"), (-1, "-1 to 2")):
        with pytest.raises(ValueError, match=f"vocab_size - 1 = 30, got {found}"):
            layer(hidden, torch.tensor([0, 1, 2, wrong]))
    for cutoffs in ((7, 7), (0, 3), (12, 7), (31,)):
        with pytest.raises(ValueError, match="cutoffs must rise and lie between 0 and vocab_size = 31"):
            AdaptiveSoftmax(V, D, cutoffs)
    with pytest.raises(ValueError, match="tile_bytes must be at least 1, got 0"):
        AdaptiveSoftmax(V, D, tile_bytes=0)
    assert "cutoffs=(7, 12, 25)" in repr(layer)
