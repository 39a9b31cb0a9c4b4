"""`RelativeAttention` against the sums of Dai et al. (2019), Sec. 3.3, written out pair by pair."""

import math

import pytest
import torch
from torch import Tensor

from fastweights.layers.relative import RelativeAttention, SegmentMemory, shift, sinusoid
from fastweights.layers.softmax import KeyValueState

D_MODEL, H, D = 6, 2, 4
CUTS = ([7], [1, 6], [3, 1, 3], [6, 1], [1] * 7)


def make(mem_len: int = 100, **options) -> RelativeAttention:
    torch.manual_seed(0)
    layer = RelativeAttention(D_MODEL, H, D, mem_len=mem_len, **options).double()
    for parameter in (layer.u, layer.v):  # As large as queries, so that a missing one shows.
        torch.nn.init.normal_(parameter)
    return layer


def inputs(T: int, B: int = 2) -> Tensor:
    return torch.randn(B, T, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(T))


def embedding(n: int) -> Tensor:
    angles = [n / 10000 ** (2 * i / D_MODEL) for i in range(D_MODEL // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def naive(layer: RelativeAttention, x: Tensor, start: list[int]) -> Tensor:
    """One sequence x (T, d_model), where token i sees the tokens from start[i] to i."""
    q, k, v = layer.query(x), *layer.key_value(x).chunk(2, -1)
    limit = len(x) if layer.clamp_len is None else layer.clamp_len
    r = [layer.distance(embedding(min(n, limit))) for n in range(len(x))]
    rows = []
    for i in range(len(x)):
        heads = []
        for h in range(H):
            part, seen = slice(h * D, (h + 1) * D), range(start[i], i + 1)
            scores = [(q[i, part] + layer.u[h]) @ k[j, part] + (q[i, part] + layer.v[h]) @ r[i - j][part] for j in seen]
            weights = (torch.stack(scores) / math.sqrt(D)).exp()
            heads.append(weights @ v[start[i] : i + 1, part] / weights.sum())
        rows.append(layer.out(torch.cat(heads)))
    return torch.stack(rows)


def in_segments(layer: RelativeAttention, x: Tensor, cut: list[int]) -> tuple[Tensor, SegmentMemory]:
    state, parts = None, []
    for segment in x.split(cut, 1):
        y, state = layer(segment, state)
        parts.append(y)
    return torch.cat(parts, 1), state


@pytest.mark.parametrize("options", [{}, {"clamp_len": 3}, {"clamp_len": 1}, {"bias": True}], ids=str)
@pytest.mark.parametrize("T", [1, 7, 33])
def test_equals_the_equations(T, options):
    layer, x = make(**options), inputs(T)
    y, state = layer(x)
    torch.testing.assert_close(y, torch.stack([naive(layer, row, [0] * T) for row in x]))
    assert torch.equal(state.inputs, x)


def test_parts_of_the_equations():
    table = sinusoid(torch.arange(100), D_MODEL, torch.float64)
    torch.testing.assert_close(table, torch.stack([embedding(n) for n in range(100)]))
    exact = sinusoid(torch.tensor([1001]), D_MODEL, torch.float64)
    torch.testing.assert_close(sinusoid(torch.tensor([1001]), D_MODEL, torch.bfloat16), exact.bfloat16())
    T, S = 3, 5
    by_distance = torch.arange(S - 1, -1, -1.0).expand(T, S)
    assert all(shift(by_distance)[i, j] == S - T + i - j for i in range(T) for j in range(S - T + i + 1))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_split_gives_the_same_while_memory_reaches_the_start(cut):
    layer, x = make(), inputs(7)
    whole, final = layer(x)
    parts, last = in_segments(layer, x, cut)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(last.tensors(), final.tensors())


def test_step_is_forward_one_token_at_a_time():
    layer, x = make(), inputs(100)
    whole, final = layer(x)
    state = None
    for t in range(100):
        y, state = layer.step(x[:, t], state)
        torch.testing.assert_close(y, whole[:, t])
    torch.testing.assert_close(state.tensors(), final.tensors())


@pytest.mark.parametrize("mem_len", [0, 2, 5])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_token_sees_its_segment_and_mem_len_before_it(mem_len, cut):
    layer, x = make(mem_len), inputs(7)
    begins = [sum(cut[:n]) for n, length in enumerate(cut) for _ in range(length)]
    y, state = in_segments(layer, x, cut)
    start = [max(0, begin - mem_len) for begin in begins]
    torch.testing.assert_close(y, torch.stack([naive(layer, row, start) for row in x]))
    assert torch.equal(state.inputs, x[:, 7 - mem_len :])


def test_mem_len_and_clamp_len_may_change_between_calls():
    layer, x = make(mem_len=100), inputs(7)
    _, state = layer(x[:, :4])
    layer.mem_len, layer.clamp_len = 2, 3
    y, state = layer(x[:, 4:], state)
    torch.testing.assert_close(y[0], naive(layer, x[0], [0] * 4 + [2] * 3)[4:])
    assert torch.equal(state.inputs, x[:, 5:])


def test_gradients_stop_at_the_memory_but_reach_the_weights_through_it():
    layer, x = make(), inputs(7).requires_grad_()
    _, state = layer(x[:, :4])
    assert not state.inputs.requires_grad
    layer(x[:, 4:], state)[0].square().sum().backward()
    assert (x.grad[:, :4] == 0).all()
    assert (x.grad[:, 4:] != 0).any(-1).all()
    (expected,) = torch.autograd.grad(layer(x)[0][:, 4:].square().sum(), layer.key_value.weight)
    torch.testing.assert_close(layer.key_value.weight.grad, expected)


def test_the_memory_is_a_copy():
    layer, x = make(mem_len=3), inputs(7, B=1)
    _, state = layer(x)
    kept = x[:, 4:].clone()
    x.zero_()
    assert torch.equal(state.inputs, kept)
    assert state.inputs.untyped_storage().nbytes() == state.nbytes == 3 * D_MODEL * 8


def test_the_past_does_not_depend_on_the_future():
    layer, x = make(), inputs(7)
    other = x.clone()
    other[:, 4] += 1
    before, after = layer(x)[0], layer(other)[0]
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_no_trace(side, bias):
    layer, x, lengths = make(bias=bias), inputs(7, B=4), (7, 5, 1, 0)
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
    y.sum().backward()
    assert (padded.grad[~mask] == 0).all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_padding_stays_invisible_to_later_segments():
    layer, x = make(mem_len=4), inputs(7)
    mask = torch.tensor([[False, False, True], [True, True, True]])
    _, state = layer(x[:, :3], mask=mask)
    y, state = layer(x[:, 3:5], state)
    assert torch.equal(state.mask, torch.tensor([[False, True, True, True], [True] * 4]))
    z, state = layer(x[:, 5:], state)
    torch.testing.assert_close(torch.cat([y, z], 1)[0], naive(layer, x[0], [0] * 3 + [2] * 4)[3:])
    torch.testing.assert_close(z[1], naive(layer, x[1], [0] * 5 + [1] * 2)[5:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_exact(dtype):
    """In float32 too, where other SDPA kernels are chosen, which must not lose the gradient of the bias."""
    layer, x = make(), inputs(3).requires_grad_()
    state, mask = SegmentMemory(inputs(2)), torch.tensor([[True, True, False], [False, True, True]])
    if dtype == torch.float64:
        call = lambda x, *_: layer(x, state, mask)[0]  # noqa: E731
        assert torch.autograd.gradcheck(call, (x, *layer.parameters()))
        return
    expected = torch.autograd.grad(layer(x, state, mask)[0].square().sum(), (x, *layer.parameters()))
    layer, x = layer.float(), x.detach().float().requires_grad_()
    got = torch.autograd.grad(layer(x, state.to(dtype), mask)[0].square().sum(), (x, *layer.parameters()))
    torch.testing.assert_close([g.double() for g in got], list(expected), atol=1e-5, rtol=1e-4)


def test_dropout_acts_on_weights_in_training_only():
    layer, x = RelativeAttention(D_MODEL, 1, mem_len=0, dropout=0.5).double(), inputs(1, B=1).expand(32, 1, D_MODEL)
    # A lone token has one weight, 1, which is dropped or doubled.
    assert set((layer(x)[0] / layer.eval()(x)[0]).flatten().tolist()) == {0.0, 2.0}


def test_compiles_without_graph_breaks():
    layer, x = make(), inputs(7)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, state = compiled(x[:, :2])
    z, state = compiled(x[:, 2:5], state)
    w, state = compiled(x[:, 5:], state, torch.ones(2, 2, dtype=torch.bool))
    torch.testing.assert_close(torch.cat([y, z, w], 1), layer(x)[0])
    z.sum().backward()
    assert layer.u.grad.isfinite().all()


def test_autocast_agrees_with_full_precision():
    layer, x = make().float(), inputs(7).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x[:, :4])
        z, _ = layer(x[:, 4:], state)
    assert (y.dtype, state.inputs.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(torch.cat([y, z], 1).float(), layer(x)[0], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mem_len", [0, 2, 100])
def test_state_round_trips(mem_len, masked, tmp_path):
    layer, x = make(mem_len), inputs(7)
    _, state = layer(x[:, :3], mask=torch.arange(3).expand(2, 3) > 0 if masked else None)
    expected, _ = layer(x[:, 3:], state)
    state.save(tmp_path / "state")
    for same in (state.clone(), state.detach(), SegmentMemory.load(tmp_path / "state"), state.to("cpu")):
        assert torch.equal(layer(x[:, 3:], same)[0], expected)
    index = torch.tensor([1, 0, 0])
    torch.testing.assert_close(layer(x[index, 3:], state.reorder(index))[0], expected[index])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f, x, s: f(x[0]), ValueError, r"x must have shape \(B, T, d_model = 6\), got \(7, 6\); one token"),
        (lambda f, x, s: f.step(x[:, 0, 1:]), ValueError, r"x must have shape \(B, d_model = 6\), got \(2, 5\)"),
        (lambda f, x, s: f(x, mask=x[..., 0]), TypeError, r"mask must be a bool .* \(2, 7\).* got torch.float64"),
        (lambda f, x, s: f(x, KeyValueState(x, x)), TypeError, "must be a SegmentMemory or None, got KeyValueState"),
        (lambda f, x, s: f(x[:1], s), ValueError, r"state.inputs must have shape \(1, S, 6\) here, got \(2, 7, 6\)"),
        (lambda f, x, s: f(x, s.to("meta")), ValueError, "state.inputs is on meta but x on cpu"),
        (lambda f, x, s: RelativeAttention(8, 3, mem_len=1), ValueError, "d_model = 8 does not divide into 3 heads"),
        (lambda f, x, s: RelativeAttention(7, 1, mem_len=1), ValueError, "d_model must be even"),
        (lambda f, x, s: RelativeAttention(6, 1, mem_len=-1), ValueError, "mem_len must be at least 0"),
        (lambda f, x, s: RelativeAttention(6, 1, mem_len=1, clamp_len=-1), ValueError, "None for no limit, got -1"),
    ],
)
def test_errors_say_what_would_work(call, error, message):
    layer, x = make(), inputs(7)
    with pytest.raises(error, match=message):
        call(layer, x, layer(x)[1])
