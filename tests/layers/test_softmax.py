"""`SoftmaxAttention` against Eqs. 4-7 written out position by position."""

import math

import pytest
import torch
from torch import Tensor

from fastweights.layers.relative import SegmentMemory
from fastweights.layers.softmax import KeyValueState, SoftmaxAttention, visible

D_MODEL, H, D = 6, 2, 4
LENGTHS = (1, 7, 33)
CUTS = ([7], [1, 6], [3, 1, 3], [6, 1], [1] * 7)


def make(**options) -> SoftmaxAttention:
    torch.manual_seed(0)
    return SoftmaxAttention(D_MODEL, H, D, **options).double()


def inputs(T: int, B: int = 2) -> Tensor:
    return torch.randn(B, T, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(T))


def naive(layer: SoftmaxAttention, x: Tensor) -> Tensor:
    """Eq. 7, one sequence x (T, d_model), one head and one position at a time."""
    T, d = len(x), layer.d_head
    q, kv = layer.query(x), layer.key_value(x)
    k, v = kv[:, : H * d], kv[:, H * d :]
    rows = []
    for i in range(T):
        seen = range(i + 1 if layer.causal else T)
        heads = []
        for part in (slice(h * d, (h + 1) * d) for h in range(H)):
            weights = torch.stack([(k[j, part] @ q[i, part] / math.sqrt(d)).exp() for j in seen])
            heads.append((weights[:, None] * v[: len(seen), part]).sum(0) / weights.sum())
        rows.append(layer.out(torch.cat(heads)))
    return torch.stack(rows)


def in_segments(layer: SoftmaxAttention, x: Tensor, cut: list[int]) -> tuple[Tensor, KeyValueState]:
    state, parts = None, []
    for segment in x.split(cut, 1):
        y, state = layer(segment, state)
        parts.append(y)
    return torch.cat(parts, 1), state


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"bias": True}], ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_equals_the_equations(T, options):
    layer, x = make(**options), inputs(T)
    y, state = layer(x)
    torch.testing.assert_close(y, torch.stack([naive(layer, row) for row in x]))
    assert state.k.shape == state.v.shape == (2, T, H, D)
    assert state.mask is None


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_split_gives_the_same_outputs_gradients_and_state(cut):
    layer = make()
    x, g = inputs(7).requires_grad_(), inputs(7).flip(1)
    whole, final = layer(x)
    parts, last = in_segments(layer, x, cut)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(last.tensors(), final.tensors())
    everything = (x, *layer.parameters())
    expected = torch.autograd.grad((whole * g).sum(), everything)
    torch.testing.assert_close(torch.autograd.grad((parts * g).sum(), everything), expected)


def test_step_is_forward_one_token_at_a_time():
    layer, x = make(), inputs(63)
    whole, final = layer(x)
    state = None
    for t in range(63):
        y, state = layer.step(x[:, t], state)
        torch.testing.assert_close(y, whole[:, t])
    torch.testing.assert_close(state.tensors(), final.tensors())


def test_the_past_does_not_depend_on_the_future():
    layer, x = make(), inputs(7)
    other = x.clone()
    other[:, 4] += 1
    before, after = layer(x)[0], layer(other)[0]
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()
    everywhere = make(causal=False)
    assert (everywhere(x)[0] != everywhere(other)[0]).any(-1).all()


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"bias": True}], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_no_trace(side, options):
    layer, x, lengths = make(**options), inputs(7, B=4), (7, 5, 1, 0)
    padded, mask = torch.full_like(x, torch.nan), torch.zeros(4, 7, dtype=torch.bool)
    for b, n in enumerate(lengths):
        mask[b, slice(7 - n, 7) if side == "left" else slice(n)] = True
    padded[mask] = x[mask]
    padded.requires_grad_()
    y, _ = layer(padded, mask=mask)
    for b, n in enumerate(lengths):
        if n:
            torch.testing.assert_close(y[b, mask[b]], layer(x[b : b + 1, mask[b]])[0][0])
    assert (y[~mask] == 0).all()
    assert visible(7, 7, mask, layer.causal, x.device).any(-1).all()  # No kernel meets a softmax over nothing.
    y.sum().backward()
    assert (padded.grad[~mask] == 0).all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_padding_stays_invisible_to_later_segments():
    layer, x = make(), inputs(7)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    _, state = layer(x[:, :2])
    _, state = layer(x[:, 2:5], state, mask)
    y, state = layer(x[:, 5:], state)
    kept = x[:1, [0, 1, 2, 3, 5, 6]]
    torch.testing.assert_close(y[:1], layer(kept)[0][:, 4:])
    torch.testing.assert_close(y[1:], layer(x[1:])[0][:, 5:])
    assert torch.equal(state.mask[0], torch.tensor([1, 1, 1, 1, 0, 1, 1], dtype=torch.bool))
    token, _ = layer.step(x[:, 0], state)
    torch.testing.assert_close(token[:1], layer(torch.cat([kept, x[:1, :1]], 1))[0][:, -1])


def test_gradients_are_exact():
    layer, x = make(), inputs(3).requires_grad_()
    mask = torch.tensor([[True, True, False], [False, True, True]])
    k, v = (torch.randn(2, 2, H, D, dtype=torch.float64, requires_grad=True) for _ in "kv")

    def call(x, k, v, *_):
        y, state = layer(x, KeyValueState(k, v), mask)
        return y, state.k, state.v

    assert torch.autograd.gradcheck(call, (x, k, v, *layer.parameters()))


def test_dropout_acts_on_weights_in_training_only():
    layer, x = SoftmaxAttention(D_MODEL, 1, dropout=0.5).double(), inputs(1, B=1).expand(32, 1, D_MODEL)
    y = layer.eval()(x)[0]
    # A lone token has one weight, 1, which is dropped or doubled.
    doubled = layer.train()(x)[0] / y
    assert set(doubled.flatten().tolist()) == {0.0, 2.0}


# Dynamo looks at .grad of the state, which is no leaf, and silences the warning in a way that fails under "error".
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiles_without_graph_breaks():
    layer, x = make(), inputs(7)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    # By the second length sizes are symbols.
    y, state = compiled(x[:, :2])
    z, state = compiled(x[:, 2:5], state)
    w, state = compiled(x[:, 5:], state, torch.ones(2, 2, dtype=torch.bool))
    torch.testing.assert_close(torch.cat([y, z, w], 1), layer(x)[0])
    z.sum().backward()
    assert layer.query.weight.grad.isfinite().all()


def test_autocast_agrees_with_full_precision():
    layer, x = make().float(), inputs(7).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x[:, :4])
        z, state = layer(x[:, 4:], state)
    assert y.dtype == state.k.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat([y, z], 1).float(), layer(x)[0], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("B", [1, 3])
def test_state_round_trips(B, masked, tmp_path):
    layer, x = make(), inputs(7, B)
    mask = torch.arange(3).expand(B, 3) > 0 if masked else None
    _, state = layer(x[:, :3], mask=mask)
    expected, _ = layer(x[:, 3:], state)
    state.save(tmp_path / "state")
    for same in (state.clone(), state.detach(), KeyValueState.load(tmp_path / "state"), state.to("cpu")):
        assert torch.equal(layer(x[:, 3:], same)[0], expected)
    assert not state.detach().k.requires_grad
    assert state.nbytes == 2 * B * 3 * H * D * 8 + (3 * B if masked else 0)
    index = torch.tensor([B - 1, 0, 0])
    torch.testing.assert_close(layer(x[index, 3:], state.reorder(index))[0], expected[index])
    half = state.to(torch.float32)
    assert half.k.dtype == torch.float32
    assert half.mask is None or half.mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f, x, s: f(x[0]), ValueError, r"x must have shape \(B, T, d_model = 6\), got \(7, 6\); one token"),
        (lambda f, x, s: f(x[..., :5]), ValueError, r"d_model = 6\), got \(2, 7, 5\)"),
        (lambda f, x, s: f(x[:, :0]), ValueError, r"got \(2, 0, 6\)"),
        (lambda f, x, s: f.step(x), ValueError, r"x must have shape \(B, d_model = 6\), got \(2, 7, 6\); a segment"),
        (lambda f, x, s: f(x, mask=x[..., 0]), TypeError, r"mask must be a bool .* \(2, 7\).* got torch.float64"),
        (lambda f, x, s: f(x, mask=[True]), TypeError, "got list"),
        (lambda f, x, s: f(x, mask=x[:, 1:, 0] > 0), ValueError, r"mask must have shape .* \(2, 7\), got \(2, 6\)"),
        (lambda f, x, s: f(x, mask=(x[..., 0] > 0).to("meta")), ValueError, "mask is on meta but x on cpu"),
        (lambda f, x, s: f(x, (s.k, s.v)), TypeError, "must be a KeyValueState or None, got tuple"),
        (lambda f, x, s: f(x, SegmentMemory(x)), TypeError, "got SegmentMemory; it comes from another kind of layer"),
        (lambda f, x, s: f(x[:1], s), ValueError, r"state.k must have shape \(1, S, 2, 4\) here, got \(2, 7, 2, 4\)"),
        (lambda f, x, s: f(x, s.to("meta")), ValueError, "state.k is on meta but x on cpu"),
        (lambda f, x, s: f(x, s.to(torch.float32)), TypeError, r"state.k is torch.float32.* state.to\(torch.float64\)"),
        (lambda f, x, s: f(x, KeyValueState(s.k, s.v, mask=x[:, 1:, 0] > 0)), ValueError, r"state.mask .* \(2, 7\)"),
        (lambda f, x, s: SoftmaxAttention(7, 2), ValueError, "d_model = 7 does not divide into 2 heads"),
        (lambda f, x, s: SoftmaxAttention(6, 0), ValueError, "at least 1, got 6, 0 and None"),
        (lambda f, x, s: SoftmaxAttention(6, 2, dropout=1.0), ValueError, "below 1, got 1.0"),
    ],
)
def test_errors_say_what_would_work(call, error, message):
    layer, x = make(), inputs(7)
    with pytest.raises(error, match=message):
        call(layer, x, layer(x)[1])
