"""Retrieval the plain way: one-hot values, embeddings concatenated and multiplied, memories built step by step."""

import torch
from torch.nn import functional as F

from fastweights.feature_maps import FAVOR


def parameters(model):
    """The model's weights in the layout of Sec. 6.1: E, W_K and its bias, W_Q and its bias, the gate and its bias."""
    d = model.d_key
    W_k = torch.cat([model.value_table.mT, model.key_weight], 1)
    return {
        "E": model.embedding,
        "W_k": W_k[:d],
        "b_k": model.key_bias[:d],
        "W_q": model.query_weight,
        "b_q": model.query_bias,
        "W_b": W_k[d:],
        "b_b": model.key_bias[d:],
    }


def favor(x, R):
    """Eqs. 31-32."""
    h = torch.exp(-(x.norm(dim=-1, keepdim=True) ** 2) / 2) / 2**0.5
    return h / len(R) ** 0.5 * torch.cat([torch.exp(x @ R.mT), torch.exp(-x @ R.mT)], -1)


def read(model, keys, values, query):
    """ŷ (S,) for one sequence and one query."""
    p, S, eps = parameters(model), model.size, model.read_eps
    v = F.one_hot(values, S).to(p["E"].dtype)
    x = torch.cat([v, p["E"][keys]], -1)
    k, q = F.linear(x, p["W_k"], p["b_k"]), F.linear(p["E"][query], p["W_q"], p["b_q"])
    if model.rule == "softmax":
        return (k @ q / model.d_key**0.5).softmax(0) @ v
    if isinstance(model.phi, FAVOR):
        k, q = favor(k, model.phi.projection), favor(q, model.phi.projection)
    else:
        k, q = model.phi.map(k), model.phi.map(q)
    if model.rule == "sum":
        W, z = torch.einsum("lv, ld -> vd", v, k), k.sum(0)
        return W @ q / (z @ q + eps)
    beta = torch.sigmoid(F.linear(x, p["W_b"], p["b_b"]))
    if model.rule == "delta":
        k, q = k / k.sum(-1, keepdim=True), q / (q.sum() + eps)
    W = torch.outer(v[0], beta[0] * k[0])
    for t in range(1, len(keys)):
        v_bar = W @ k[t]
        W = W - torch.outer(v_bar, k[t]) + torch.outer(beta[t] * v[t] + (1 - beta[t]) * v_bar, k[t])
        if model.rule == "schlag2021":
            W = W / (torch.relu(W.norm() - 1) + 1)
    return F.layer_norm(W @ q, (S,)) if model.rule == "schlag2021" else W @ q


def last_value(keys, values, query):
    """What the query should find."""
    return [v for k, v in zip(keys.tolist(), values.tolist(), strict=True) if k == query][-1]


def loss(model, batch):
    """Mean of ½|v* - ŷ|² over a batch with any number of queries, by a loop over all of them."""
    losses, weights = [], []
    for b, values in enumerate(batch.values):
        keys = torch.arange(model.size) if batch.keys is None else batch.keys[b]
        queries = range(model.size) if batch.queries is None else batch.queries[b].tolist()
        for i, query in enumerate(queries):
            weight = 1.0 if batch.weights is None else batch.weights[b, i].item()
            if weight:
                wanted = F.one_hot(torch.tensor(last_value(keys, values, query)), model.size)
                losses.append(0.5 * (wanted - read(model, keys, values, query)).pow(2).sum())
                weights.append(weight)
    weights = torch.tensor(weights, dtype=losses[0].dtype)
    return (torch.stack(losses) * weights).sum() / weights.sum()
