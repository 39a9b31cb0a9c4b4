"""Statements of the paper, as far as they are about the memory."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastweights as fw
from fastweights.ops.linear_attention import read_memory, write_memory
from tests.ops.calls import PAIRS, random_call

BACKENDS = sorted({backend for _, backend in PAIRS})


def write(keys, values, rule, beta=1.0, state=None, backend="auto"):
    """The memory after writing rows of `values` under rows of `keys`, as a function that reads it."""
    k, v = keys[None, :, None], values[None, :, None]
    gates = {"beta": torch.full(k.shape[:3], beta, dtype=k.dtype)} if "beta" in fw.update_rule(rule).gate_names else {}
    _, state = fw.fast_weight_memory(k, k, v, rule=rule, state=state, backend=backend, **gates)
    return state, lambda queries: queries @ state.W[0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_normalisation_of_the_sum_rule_is_normalised_attention(backend):
    """Eq. 19 equals Eq. 13: weights phi(k_j)·phi(q_i) over their sum, j <= i, computed quadratically."""
    call = random_call("sum", "attention", 2, 50, 3, 6, 4)
    call.state = tuple(x * 0 for x in call.state)
    weights = torch.einsum("bihd,bjhd->bhij", call.q, call.k).tril()
    expected = torch.einsum("bhij,bjhm->bihm", weights / weights.sum(-1, keepdim=True), call.v)
    torch.testing.assert_close(call.run(backend)[0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_read_back_is_zero(backend):
    """v_bar of the first step is 0 (Sec. 4.2), so the first write is beta v ⊗ k whatever the normalisation."""
    call = random_call("delta", "attention", 1, 1, 1, 4, 3)
    call.state = tuple(x * 0 for x in call.state)
    expected = torch.einsum("d,m->dm", call.k[0, 0, 0], call.gates["beta"][0, 0, 0] * call.v[0, 0, 0])
    torch.testing.assert_close(call.run(backend)[1][0, 0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_delta_overwrites_one_association_and_leaves_the_others(backend):
    """App. B: with orthonormal keys the delta rule edits k2 alone; the gated rule fades k1 too."""
    keys, beta = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0], 0.7
    old, new = torch.randn(8, 5, dtype=torch.float64), torch.randn(1, 5, dtype=torch.float64)
    state, _ = write(keys, old, "sum", backend=backend)
    for rule in ("delta", "gated"):
        _, read = write(keys[2:3], new, rule, beta, state, backend)
        torch.testing.assert_close(read(keys[2:3]), (1 - beta) * old[2:3] + beta * new)
        others = [i for i in range(8) if i != 2]
        expected = old[others] * (1 if rule == "delta" else 1 - beta)
        torch.testing.assert_close(read(keys[others]), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["sum", "delta"])
def test_capacity_is_d_dot(rule, backend):
    """Sec. 4.1: d_dot orthogonal keys are retrieved without error; one more key cannot be."""
    d_dot = 16
    keys = torch.linalg.qr(torch.randn(d_dot, d_dot, dtype=torch.float64))[0]
    values = torch.randn(d_dot + 1, d_dot + 1, dtype=torch.float64)
    _, read = write(keys, values[:-1], rule, backend=backend)
    torch.testing.assert_close(read(keys), values[:-1])
    extra = torch.nn.functional.normalize(torch.randn(1, d_dot, dtype=torch.float64))
    crowded = torch.cat([keys, extra])
    _, read = write(crowded, values, rule, backend=backend)
    assert (read(crowded) - values).abs().max() > 0.1


def test_no_memory_holds_more_than_d_dot_values():
    """The bound itself: d_dot + 1 independent values cannot all be read from a matrix of rank d_dot."""
    keys, values = torch.rand(9, 8, dtype=torch.float64), torch.eye(9, dtype=torch.float64)
    best = torch.linalg.lstsq(keys, values).solution
    assert (keys @ best - values).norm() > 0.1


def test_sum_normalisation_balances_write_and_remove():
    """App. A.2: column i of W moves by k_i v - sum_j k_i k_j w_j; the weights of both sides agree."""
    k = fw.sum_normalize(torch.rand(6, dtype=torch.float64))
    torch.testing.assert_close(torch.outer(k, k).sum(-1), k)
    # If all columns hold the same value c, writing v moves each towards v by its own weight: a convex mix.
    c, v = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    state = fw.FastWeightState(c.expand(1, 1, 6, 3).clone())
    state, _ = write(k[None], v[None], "delta", 1.0, state)
    torch.testing.assert_close(state.W[0, 0], (1 - k)[:, None] * c + k[:, None] * v)


def test_schlag2021_keeps_the_norm_at_most_one():
    call = random_call("schlag2021", None, 2, 30, 2, 8, 8)
    call.v = call.v * 50
    W = call.run()[1]
    torch.testing.assert_close(W.norm(dim=(-2, -1)), torch.ones(2, 2, dtype=W.dtype))


@pytest.mark.parametrize("S", [2, 14])
@pytest.mark.parametrize("phi", ["elu", "dpfp", "favor"])
def test_linear_attention_is_quadratic_attention_with_phi(phi, S):
    phi = fw.feature_map(phi, d_key=6).double().eval()
    q, k = phi(torch.randn(2, 9, 3, 6, dtype=torch.float64)), phi(torch.randn(2, S, 3, 6, dtype=torch.float64))
    v = torch.randn(2, S, 3, 5, dtype=torch.float64)
    mask = torch.rand(2, S) < 0.7
    weights = torch.einsum("bihd,bjhd->bhij", q, k) * mask[:, None, None]
    # A sparse query may have nothing in common with any key left: 0 / 0 for the quadratic form, 0 for ours.
    expected = torch.einsum("bhij,bjhm->bihm", (weights / weights.sum(-1, keepdim=True)).nan_to_num(0), v)
    torch.testing.assert_close(fw.linear_attention(q, k, v, mask), expected)
    plain = fw.linear_attention(q, k, v, mask, normalization=None)
    torch.testing.assert_close(plain, torch.einsum("bhij,bjhm->bihm", weights, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("normalization", ["attention", None])
def test_a_memory_written_at_once_is_read_as_linear_attention(normalization, dtype):
    """Eqs. 17-19 after all steps: W sums k ⊗ v and z sums k, without padding and in float32 at least."""
    q, k, v = (torch.rand(2, n, 3, size).to(dtype) for n, size in ((4, 5), (7, 5), (7, 6)))
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    state = write_memory(k, v.masked_fill(~mask[..., None, None], float("nan")), mask, normalization=normalization)
    wide = torch.promote_types(dtype, torch.float32)
    counted = k.to(wide) * mask[..., None, None]
    torch.testing.assert_close(state.W, torch.einsum("bshd,bshm->bhdm", counted, v.to(wide)))
    assert state.z is None if normalization is None else torch.allclose(state.z, counted.sum(1))
    expected = fw.linear_attention(q.to(wide), k.to(wide), v.to(wide), mask, normalization=normalization)
    torch.testing.assert_close(read_memory(q, state), expected.to(dtype), check_dtype=True)


@pytest.mark.parametrize(("T", "S"), [(9, 2), (2, 9), (9, 14), (40, 50), (4, 4), (1, 60)])
def test_linear_attention_takes_the_order_with_fewer_products(T, S):
    D, M = 6, 4
    q, k, v = torch.rand(2, T, 3, D), torch.rand(2, S, 3, D), torch.rand(2, S, 3, M)
    with FlopCounterMode(display=False) as counter:
        fw.linear_attention(q, k, v, normalization=None)
    assert counter.get_total_flops() == 2 * 2 * 3 * min(T * S * D + T * S * M, S * D * M + T * D * M)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalization", ["attention", None])
def test_linear_attention_reads_zero_where_there_is_no_key(dtype, normalization):
    q, k, v = (torch.rand(2, n, 1, 3, dtype=dtype) for n in (5, 0, 0))
    for mask in (None, torch.ones(2, 0, dtype=torch.bool)):
        assert torch.equal(fw.linear_attention(q, k, v, mask, normalization=normalization), torch.zeros_like(q))


@pytest.mark.parametrize("S", [1, 4])
def test_linear_attention_reads_zero_where_every_key_is_padding(S):
    q, k, v = (torch.rand(2, S, 1, 3, requires_grad=True) for _ in range(3))
    y = fw.linear_attention(q, k, v, torch.tensor([[False] * S, [True] * S]))
    assert not y[0].any() and y[1].all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, k, v)))
