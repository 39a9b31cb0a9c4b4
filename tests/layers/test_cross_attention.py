"""A sequence remembered once and read by many: the sums written out, padding without a trace, beams that share."""

import pytest
import torch

from fastweights.layers.cross_attention import FastWeightCrossAttention, SoftmaxCrossAttention
from fastweights.ops.linear_attention import linear_attention, read_memory, write_memory
from fastweights.ops.state import FastWeightState

D, H = 6, 2
KINDS = {
    "softmax": lambda: SoftmaxCrossAttention(D, H),
    "elu": lambda: FastWeightCrossAttention(D, H),
    "dpfp": lambda: FastWeightCrossAttention(D, H, feature_map="dpfp", feature_map_options={"nu": 2}),
    "favor": lambda: FastWeightCrossAttention(D, H, feature_map="favor", feature_map_options={"m": 5}),
}


def make(kind):
    return KINDS[kind]().double().eval()


def rows(*shape):
    return torch.randn(*shape, D, dtype=torch.float64)


def by_hand(layer, x, sentence):
    """Weights between every two tokens, head by head."""
    q, (k, v) = layer.query(x), layer.key_value(sentence).chunk(2, -1)
    heads = []
    for h in range(H):
        at = slice(h * D // H, (h + 1) * D // H)
        qh, kh, vh = q[:, at], k[:, at], v[:, at]
        if isinstance(layer, SoftmaxCrossAttention):
            weights = (qh @ kh.mT / (D // H) ** 0.5).softmax(-1)
        else:
            weights = layer.feature_map.map(qh) @ layer.feature_map.map(kh).mT
            weights = weights / weights.sum(-1, keepdim=True)
        heads.append(weights @ vh)
    return layer.out(torch.cat(heads, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_is_attention_over_the_whole_sequence(kind):
    layer, x, sentence = make(kind), rows(2, 4), rows(2, 5)
    y = layer(x, layer.remember(sentence))
    for i in range(2):
        torch.testing.assert_close(y[i], by_hand(layer, x[i], sentence[i]))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_no_trace(kind):
    layer, x, sentence = make(kind), rows(3, 4), rows(3, 5).requires_grad_()
    lengths = torch.tensor([5, 2, 3])
    mask = torch.arange(5) < lengths.unsqueeze(1)
    with torch.no_grad():
        sentence[~mask] = torch.inf
    y = layer(x, layer.remember(sentence, mask))
    for i, n in enumerate(lengths):
        torch.testing.assert_close(y[i], layer(x[i : i + 1], layer.remember(sentence[i : i + 1, :n]))[0])
    (gradient,) = torch.autograd.grad(y.square().sum(), sentence)
    assert not gradient[~mask].any() and gradient[mask].isfinite().all()
    # A sequence without a single token is read as zeros, not as NaN.
    nothing = layer(x, layer.remember(sentence, torch.zeros_like(mask)))
    assert not nothing.any()


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_rows_share_a_memory(kind):
    layer, x, sentence = make(kind), rows(6, 2), rows(3, 5)
    memory = layer.remember(sentence)
    each = layer.remember(sentence.repeat_interleave(2, 0))
    torch.testing.assert_close(layer(x, memory), layer(x, each))
    with pytest.raises(ValueError, match="4 rows cannot share 3 memories"):
        layer(x[:4], memory)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    layer, x, sentence = make(kind), rows(2, 2).requires_grad_(), rows(1, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, sentence: layer(x, layer.remember(sentence)), (x, sentence))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("S", [2, 200])
def test_training_and_evaluation_are_one_function(kind, S):
    """Few keys are weighed in training and many remembered; in evaluation W and z are read."""
    layer, x, sentence = make(kind), rows(2, 4).requires_grad_(), rows(2, S).requires_grad_()
    if kind == "favor":
        layer.feature_map.redraws = False
    mask = torch.arange(S) < torch.tensor([[S], [2]])
    found = []
    for training in (False, True):
        y = layer.train(training)(x, layer.remember(sentence, mask))
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, sentence))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_memory_of_fast_weights_has_one_size():
    layer = make("dpfp")
    assert layer.remember(rows(1, 3)).nbytes == layer.remember(rows(1, 300)).nbytes


def test_new_features_are_drawn_where_a_memory_is_written():
    layer = KINDS["favor"]().double()
    x, sentence = rows(2, 4), rows(2, 5)
    before = layer.feature_map.projection.clone()
    memory = layer.remember(sentence)
    drawn = layer.feature_map.projection.clone()
    assert not torch.equal(before, drawn)
    y = layer(x, memory)
    assert torch.equal(layer.feature_map.projection, drawn)
    torch.testing.assert_close(y[0], by_hand(layer, x[0], sentence[0]))


def test_writing_and_reading_is_linear_attention():
    q, k, v = (torch.rand(2, n, H, D, dtype=torch.float64) for n in (4, 5, 5))
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    for normalization in ("attention", None):
        state = write_memory(k, v, mask, normalization=normalization)
        assert (state.z is None) == (normalization is None)
        torch.testing.assert_close(read_memory(q, state), linear_attention(q, k, v, mask, normalization=normalization))
    half = write_memory(k.bfloat16(), v.bfloat16())
    assert half.W.dtype == torch.float32 and read_memory(q.bfloat16(), half).dtype == torch.bfloat16


def test_a_memory_of_the_other_kind_is_refused():
    x = rows(1, 3)
    with pytest.raises(TypeError, match="got FastWeightState"):
        make("softmax")(x, make("elu").remember(x))
    with pytest.raises(TypeError, match="got RawState"):
        make("softmax")(x, make("elu").train().remember(x))
    with pytest.raises(TypeError, match="got KeyValueState"):
        make("elu")(x, make("softmax").remember(x))
    with pytest.raises(TypeError, match="memory must be what `remember` returns, got Tensor"):
        make("elu")(x, x)
    assert isinstance(make("elu").remember(x), FastWeightState)
