"""The retrieval models compute Sec. 6.1's losses and gradients, plainly and by exact short cuts, in both settings."""

import pytest
import torch

from fastweights import fast_weight_memory
from fastweights.data.synthetic import evaluation_batch, training_batches
from fastweights.feature_maps import feature_map
from fastweights.models.retrieval import MODELS, RetrievalModel, half_squared_error
from fastweights.models.retrieval_shortcuts import ClippedWrites, DeltaRead, DPFPScores, ShortcutRetrievalModel, pair
from tests.experiments import retrieval_oracle as oracle

ALL = [(setting, name) for setting, models in MODELS.items() for name in models]
KINDS = [RetrievalModel, ShortcutRetrievalModel]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def build(kind, setting, name, size=7, d_key=6, **options):
    model = kind(size, MODELS[setting][name], d_key, generator(), dtype=torch.float64, **options)
    if "schlag" in name:
        # Keys long enough for the norm to be cut at most steps, but not at all of them.
        with torch.no_grad():
            model.key_weight.mul_(2)
    return model


def loss_of(model, batch):
    return half_squared_error(model(*batch[:3]), *batch[3:])


def assert_same_gradients(model, loss, other_model, other_loss):
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights), torch.autograd.grad(other_loss, list(other_model.parameters()))
    for name, ours, theirs in zip(names, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


# In the larger batch more pairs occur than there are, and some short cuts then map each pair once.
@pytest.mark.parametrize("sequences", [2, 5])
@pytest.mark.parametrize(("setting", "name"), ALL)
@pytest.mark.parametrize("kind", KINDS)
def test_training_loss_and_gradients(kind, setting, name, sequences):
    model = build(kind, setting, name)
    (batch,) = training_batches(setting, 7, 1, sequences, generator(1))
    loss, expected = loss_of(model, batch), oracle.loss(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    assert_same_gradients(model, loss, model, expected)


@pytest.mark.parametrize(("size", "d_key", "sequences"), [(2, 5, 3), (13, 3, 1), (33, 7, 3), (67, 5, 1)])
@pytest.mark.parametrize(("setting", "name"), ALL)
def test_short_cuts_are_exact_at_odd_sizes(setting, name, size, d_key, sequences):
    plain, fast = (build(kind, setting, name, size, d_key) for kind in KINDS)
    (batch,) = training_batches(setting, size, 1, sequences, generator(1), length=2 * size - 1)
    losses = loss_of(plain, batch), loss_of(fast, batch)
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
    assert_same_gradients(plain, losses[0], fast, losses[1])
    batch = evaluation_batch(setting, size, sequences, generator(2), length=size + 2, query_cap=5, chunk=2)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(plain, batch), loss_of(fast, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS[2])
def test_one_pair(kind, name):
    model = build(kind, 2, name)
    batch = evaluation_batch(2, 7, 3, generator(1), length=1)
    torch.testing.assert_close(loss_of(model, batch), oracle.loss(model, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"query_cap": 3}, {"query_cap": 5, "chunk": 2}], ids=str)
@pytest.mark.parametrize(("setting", "name"), ALL)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_loss(kind, setting, name, options):
    model = build(kind, setting, name)
    batch = evaluation_batch(setting, 7, 2, generator(1), length=11, **options)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, batch), oracle.loss(model, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["favor-64-delta", "dpfp-1-delta", "dpfp-1-sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_denominators(kind, name):
    model = build(kind, 2, name, read_eps=0)
    (batch,) = training_batches(2, 7, 1, 5, generator(1))
    torch.testing.assert_close(loss_of(model, batch), oracle.loss(model, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize(("d", "nu"), [(2, 1), (2, 3), (5, 1), (5, 4), (5, 5), (5, 9), (64, 3)])
def test_dpfp_scores_are_products_of_features(d, nu, with_keys):
    S, B, L = 6, 3, 6
    tables = [torch.randn(S, d, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    q = torch.randn(B, d, dtype=torch.float64, requires_grad=True)
    keys = torch.randint(S, (B, L)) if with_keys else None
    values = torch.randint(S, (B, L))
    phi = feature_map("dpfp", d, nu=nu)
    plain = (phi.map(pair(*tables, keys, values)) @ phi.map(q).unsqueeze(-1)).squeeze(-1)
    fast = DPFPScores.apply(*tables, q, keys, values, nu)
    torch.testing.assert_close(fast, plain)
    upstream = torch.randn_like(plain)
    for ours, theirs in zip(
        torch.autograd.grad(fast, [*tables, q], upstream),
        torch.autograd.grad(plain, [*tables, q], upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("queries", [1, 4])
def test_delta_read_is_the_delta_rule(chunk, queries):
    B, L, D = 3, 13, 5
    k, q = torch.rand(B, L, D, dtype=torch.float64), torch.rand(B, queries, D, dtype=torch.float64)
    beta, v = torch.rand(B, L, dtype=torch.float64), torch.randn(B, L, 4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (k, beta, q)]
    any_q = torch.zeros(B, L, 1, D, dtype=torch.float64)
    arguments = {"rule": "delta", "beta": beta.unsqueeze(2), "backend": "reference"}
    _, state = fast_weight_memory(any_q, k.unsqueeze(2), v.unsqueeze(2), **arguments)
    plain = q @ state.W.squeeze(1)
    fast = DeltaRead.apply(k, beta, q, chunk) @ v
    torch.testing.assert_close(fast, plain)
    upstream = torch.randn_like(plain)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (fast, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("queries", [1, 3])
def test_clipped_delta_read(queries):
    k = (torch.randn(3, 9, 4, dtype=torch.float64) * 0.7).requires_grad_()
    q = torch.randn(3, queries, 4, dtype=torch.float64, requires_grad=True)
    beta = torch.rand(3, 9, dtype=torch.float64, requires_grad=True)
    values = torch.randint(5, (3, 9), generator=generator())
    plain, clipped = [], []
    for b in range(3):
        W = torch.zeros(5, 4, dtype=torch.float64)
        for t in range(9):
            v = torch.nn.functional.one_hot(values[b, t], 5)
            W = W + beta[b, t] * torch.outer(v - W @ k[b, t], k[b, t])
            if t:
                clipped.append(bool(W.norm() > 1))
                W = W / W.norm().clamp(min=1)
        plain.append(q[b] @ W.mT)
    assert {True, False} == set(clipped)
    errors, logs = ClippedWrites.apply(k, beta, values, 5)
    weights = beta * logs.flip(-1).cumsum(-1).flip(-1).exp()
    torch.testing.assert_close((q @ k.mT * weights.unsqueeze(1)) @ errors, torch.stack(plain))
    assert torch.autograd.gradcheck(lambda k, beta: ClippedWrites.apply(k, beta, values, 5), (k, beta))


@pytest.mark.parametrize("name", ["schlag2021", "schlag2021-dpfp"])
def test_clipping_keeps_long_sequences_finite(name):
    """Without the divisions these memories would grow past the largest float64."""
    model = ShortcutRetrievalModel(200, MODELS[2][name], 64, generator(), dtype=torch.float64)
    (batch,) = training_batches(2, 200, 1, 1, generator(1))
    torch.testing.assert_close(loss_of(model, batch), oracle.loss(model, batch))
    single = ShortcutRetrievalModel(200, MODELS[2][name], 64, generator())
    gradients = torch.autograd.grad(loss_of(single, batch), list(single.parameters()))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_favor_with_the_delta_rule_makes_no_nan(kind):
    # At this size keys are so long that every feature underflows in float32.
    model = kind(400, MODELS[2]["favor-64-delta"], 64, generator())
    (batch,) = training_batches(2, 400, 1, 2, generator(1), length=20)
    gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    assert all(g.isfinite().all() for g in gradients)


def test_orthogonal_features():
    model = build(RetrievalModel, 1, "favor-64", d_key=16, orthogonal=True)
    rows = model.phi.projection
    blocks = rows.unflatten(0, (-1, 16))
    norms = rows.norm(dim=-1)
    gram = blocks @ blocks.mT
    torch.testing.assert_close(gram, torch.diag_embed(norms.unflatten(0, (-1, 16)) ** 2), atol=1e-9, rtol=0)
    assert norms.std() > 0.3
