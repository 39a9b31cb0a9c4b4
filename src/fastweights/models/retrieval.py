"""The retrieval models of Sec. 6.1: one memory, written L times and read by the query at the end.

Keys are k = W_K [e(k); v] and queries q = W_Q e(q), both with bias; values are one-hot and stored as they are. `MODELS`
is the table of what the paper compares, by setting. B sequences, L pairs, Q queries, S keys and as many values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.feature_maps import DPFP, FAVOR, FeatureMap, feature_map
from fastweights.models.retrieval_algebra import ClippedWrites, DeltaRead, DPFPScores, FAVORScores, Projection, pair
from fastweights.ops.normalization import safe_divide


class Batch(NamedTuple):
    """Sequences with their queries and the values to be found.

    `keys` None stands for 0 … S-1 in order, and `queries` None for every key in order: whoever reads the batch can
    leave a lookup out. `weights` says how much each query counts in the mean loss; None stands for 1.
    """

    keys: Tensor | None  # (B, L)
    values: Tensor  # (B, L)
    queries: Tensor | None  # (B, Q)
    targets: Tensor  # (B, Q)
    weights: Tensor | None = None  # (B, Q)


@dataclass(frozen=True)
class Entry:
    """A model: update rule ("softmax" for the memory that keeps every pair), feature map, and how it is trained."""

    rule: str
    feature_map: str = "identity"
    options: Mapping[str, int] = field(default_factory=dict)
    batch: int = 32
    lr: float = 1e-3


def _favor(rule: str, m: int) -> Entry:
    return Entry(rule, "favor", {"m": m})


def _dpfp(rule: str, nu: int) -> Entry:
    return Entry(rule, "dpfp", {"nu": nu})


MODELS: dict[int, dict[str, Entry]] = {
    1: {
        "softmax": Entry("softmax"),
        "linear": Entry("sum", "elu"),
        **{f"favor-{m}": _favor("sum", m) for m in (64, 128, 512)},
        **{f"dpfp-{nu}": _dpfp("sum", nu) for nu in (1, 2, 3)},
    },
    2: {
        "dpfp-1-sum": _dpfp("sum", 1),
        "dpfp-1-delta": _dpfp("delta", 1),
        "dpfp-2-delta": _dpfp("delta", 2),
        "linear-delta": Entry("delta", "elu"),
        **{f"favor-{m}-delta": _favor("delta", m) for m in (64, 128)},
        # At the learning rate and batch of the others it does not learn; the authors' code has these.
        "schlag2021": Entry("schlag2021", "tanh", batch=128, lr=1e-4),
        "schlag2021-dpfp": _dpfp("schlag2021", 1),
    },
}


# Steps of the delta rule solved at once: on a GPU one large system costs less than the launches of many small ones.
CHUNK = {"cpu": 32, "cuda": 128}


class RetrievalModel(nn.Module):
    """Reads ŷ (B, Q, S) out of a `Batch`: W_K, W_Q and the key embedding are what it learns.

    The weights of W_K that meet a one-hot value are the rows of `value_table`, and a gate's logit is one more column of
    the key. All projections are made once for the S symbols and then looked up.

    Args:
        size: S. Embeddings have int(2.2 S) entries, drawn from N(0, 1).
        entry: a row of `MODELS`.
        generator: draws the initial weights and FAVOR+'s features, on its own device.
        read_eps: added to the denominators of the read-out (Eq. 19, and Eq. 29 for the query); at 0 they are exact.
        orthogonal: FAVOR+'s random vectors in orthogonal blocks.
    """

    def __init__(
        self,
        size: int,
        entry: Entry,
        d_key: int,
        generator: torch.Generator,
        *,
        read_eps: float = 1e-6,
        orthogonal: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.size, self.d_key, self.rule, self.read_eps = size, d_key, entry.rule, read_eps
        options: dict[str, object] = dict(entry.options)
        if entry.feature_map == "favor":
            # Without eps nothing but the quotient counts, and stabilised features give it without underflow.
            options |= {"orthogonal": orthogonal, "stabilize": entry.rule == "delta" and read_eps == 0}
        self.phi: FeatureMap = feature_map(entry.feature_map, d_key, **options)
        d_emb = int(2.2 * size)
        gates = int(entry.rule in ("delta", "schlag2021"))

        def uniform(*shape: int, bound: float) -> Tensor:
            return torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)

        # Weights of W_K and W_Q are U(±1/√d_key), xavier-uniform for softmax; biases and gate have PyTorch's default.
        default_k, default_q = (size + d_emb) ** -0.5, d_emb**-0.5
        xavier = entry.rule == "softmax"
        bound_k = math.sqrt(6 / (size + d_emb + d_key)) if xavier else d_key**-0.5
        bound_q = math.sqrt(6 / (d_emb + d_key)) if xavier else d_key**-0.5
        self.embedding = nn.Parameter(torch.empty(size, d_emb, dtype=dtype).normal_(generator=generator))
        self.key_weight = nn.Parameter(
            torch.cat([uniform(d_key, d_emb, bound=bound_k), uniform(gates, d_emb, bound=default_k)])
        )
        self.value_table = nn.Parameter(
            torch.cat([uniform(size, d_key, bound=bound_k), uniform(size, gates, bound=default_k)], -1)
        )
        self.key_bias = nn.Parameter(uniform(d_key + gates, bound=default_k))
        self.query_weight = nn.Parameter(uniform(d_key, d_emb, bound=bound_q))
        self.query_bias = nn.Parameter(uniform(d_key, bound=default_q))
        if isinstance(self.phi, FAVOR):
            self.phi.to(dtype)
            self.redraw(generator)

    def redraw(self, generator: torch.Generator) -> None:
        """Draw FAVOR+'s random vectors anew, Eqs. 31-32; nothing for the other maps."""
        if isinstance(self.phi, FAVOR):
            self.phi.projection.copy_(favor_features(self.phi, generator))

    def forward(self, batch: Batch) -> Tensor:
        """ŷ for each query, (B, Q, S)."""
        return READS[self.rule](self, batch, *self.project(batch))

    def place(self, batch: Batch, coefficients: Tensor) -> Tensor:
        """Σ_t a_t v_t (B, Q, S) from the coefficients a (B, Q, L): one-hot values are written, not multiplied."""
        B, Q, L = coefficients.shape
        empty = coefficients.new_zeros(B, Q, self.size)
        return empty.scatter_add(-1, batch.values.unsqueeze(1).expand(B, Q, L), coefficients)

    def loss(self, batch: Batch) -> Tensor:
        """½ Σ_j (v*_j - ŷ_j)², the mean over the queries."""
        y = self(batch)
        error = y.scatter_add(-1, batch.targets.unsqueeze(-1), -torch.ones_like(y[..., :1]))
        losses = error.square().sum(-1) / 2
        if batch.weights is None:
            return losses.mean()
        return (losses * batch.weights).sum() / batch.weights.sum()

    def project(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Projections of the S keys (S, d_key + gates), and queries (B, Q, d_key), or (S, d_key) for all keys."""
        weights = self.embedding, self.key_weight, self.key_bias, self.query_weight, self.query_bias
        if batch.queries is None:
            E, W_k, b_k, W_q, b_q = weights
            return F.linear(E, W_k, b_k), F.linear(E, W_q, b_q)
        keys_table, q = Projection.apply(*weights, batch.queries.flatten())
        return keys_table, q.unflatten(0, batch.queries.shape)

    def keys_and_gates(self, batch: Batch, keys_table: Tensor) -> tuple[Tensor, Tensor]:
        """φ(k) (B, L, D), sum-normalised for the delta rule (Eq. 29), and β (B, L)."""
        assert batch.keys is not None
        if self.size**2 >= batch.values.numel():
            return self._map(pair(keys_table, self.value_table, batch.keys, batch.values))
        # Fewer pairs can occur than do: map each of them once.
        k, beta = self._map((keys_table.unsqueeze(1) + self.value_table).flatten(0, 1))
        at = (batch.keys * self.size + batch.values).flatten()
        k, beta = (x.index_select(0, at).unflatten(0, batch.values.shape) for x in (k, beta))
        return k, beta

    def _map(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, gate = rows.split([self.d_key, 1], -1)
        k = self.phi.map(k)
        if self.rule == "delta":
            # One division a key instead of one a feature; a key without features is not written.
            total = k.sum(-1, keepdim=True)
            k = k * safe_divide(torch.ones_like(total), total)
        return k, gate.squeeze(-1).sigmoid()


def favor_features(phi: FAVOR, generator: torch.Generator) -> Tensor:
    """Random vectors for FAVOR+ (m, d_key): independent Gaussian rows, or orthogonal in blocks with Gaussian norms."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device, dtype=phi.projection.dtype)

    rows = normal(phi.m, phi.d_key)
    if not phi.orthogonal:
        return rows
    blocks = normal(-(-phi.m // phi.d_key), phi.d_key, phi.d_key)
    return torch.linalg.qr(blocks)[0].mT.flatten(0, 1)[: phi.m] * rows.norm(dim=-1, keepdim=True)


def _softmax_read(model: RetrievalModel, batch: Batch, keys_table: Tensor, q: Tensor) -> Tensor:
    """softmax over the pairs of k·q / √d_key, where k·q is a sum of two looked-up products of tables."""
    by_key, by_value = q @ keys_table.mT, q @ model.value_table.mT
    B, L = batch.values.shape
    values = batch.values.unsqueeze(1).expand(B, q.shape[-2], L)
    scores = by_value.expand(B, -1, -1).gather(-1, values)
    if batch.keys is None:
        scores = scores + by_key
    else:
        scores = scores + by_key.expand(B, -1, -1).gather(-1, batch.keys.unsqueeze(1).expand_as(values))
    return model.place(batch, (scores / math.sqrt(model.d_key)).softmax(-1))


def _sum_read(model: RetrievalModel, batch: Batch, keys_table: Tensor, q: Tensor) -> Tensor:
    """φ(k_t)·φ(q) / (z·φ(q) + eps), Eqs. 17-19."""
    phi = model.phi
    tables, one_query = (keys_table, model.value_table), q.dim() == 3 and q.shape[1] == 1
    if one_query and isinstance(phi, DPFP):
        scores = DPFPScores.apply(*tables, q.squeeze(1), batch.keys, batch.values, phi.nu).unsqueeze(1)
    elif one_query and isinstance(phi, FAVOR) and batch.keys is None:
        # In parts that a CPU's caches hold.
        part = max(1, 2**20 // (phi.m * batch.values.shape[1])) if q.device.type == "cpu" else len(q)
        parts = zip(q.squeeze(1).split(part), batch.values.split(part), strict=True)
        scores = torch.cat([FAVORScores.apply(*tables, *each, phi.projection) for each in parts]).unsqueeze(1)
    else:
        scores = (phi.map(pair(*tables, batch.keys, batch.values)) @ phi.map(q).mT).mT
    return model.place(batch, _over(scores, scores.sum(-1, keepdim=True), model.read_eps))


def _delta_read(model: RetrievalModel, batch: Batch, keys_table: Tensor, q: Tensor) -> Tensor:
    """The delta rule, Eqs. 20-25, on sum-normalised keys and queries, Eq. 29."""
    k, beta = model.keys_and_gates(batch, keys_table)
    q = model.phi.map(q)
    q = _over(q, q.sum(-1, keepdim=True), model.read_eps)
    q = q.expand(len(k), *q.shape[-2:])
    return model.place(batch, DeltaRead.apply(k, beta, q, CHUNK[k.device.type]))


def _schlag2021_read(model: RetrievalModel, batch: Batch, keys_table: Tensor, q: Tensor) -> Tensor:
    """The rule of Schlag et al. (2021), Sec. 6.1.2, and LayerNorm: delta steps on plain keys, memories of norm 1."""
    k, beta = model.keys_and_gates(batch, keys_table)
    errors, logs = ClippedWrites.apply(k, beta, batch.values, model.size)
    # What is written at step t is scaled at t and at every later step.
    weights = beta * logs.flip(-1).cumsum(-1).flip(-1).exp()
    y = (model.phi.map(q) @ k.mT * weights.unsqueeze(1)) @ errors
    return F.layer_norm(y, (model.size,))


def _over(x: Tensor, by: Tensor, eps: float) -> Tensor:
    return x / (by + eps) if eps else safe_divide(x, by)


READS: dict[str, Callable[[RetrievalModel, Batch, Tensor, Tensor], Tensor]] = {
    "softmax": _softmax_read,
    "sum": _sum_read,
    "delta": _delta_read,
    "schlag2021": _schlag2021_read,
}
