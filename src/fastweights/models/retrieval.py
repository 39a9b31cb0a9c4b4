"""The retrieval models of Sec. 6.1: a memory takes L pairs of key and value, then answers queries.

Keys are k = W_K [e(k); v] and queries q = W_Q e(q), both with bias; values are one-hot and stored as they are. `MODELS`
lists what the paper compares. B sequences, L pairs, Q queries, S symbols for keys and as many for values.

`ShortcutRetrievalModel` beside this one computes the same numbers faster; the experiments use it unless told otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.feature_maps import FeatureMap, feature_map
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import safe_divide, sum_normalize
from fastweights.ops.state import FastWeightState


@dataclass(frozen=True)
class Entry:
    """A model: update rule ("softmax" for the memory that keeps every pair), feature map, and how it is trained."""

    rule: str
    feature_map: str = "identity"
    options: Mapping[str, int] = field(default_factory=dict)
    batch: int = 32
    lr: float = 1e-3


MODELS: dict[int, dict[str, Entry]] = {
    1: {
        "softmax": Entry("softmax"),
        "linear": Entry("sum", "elu"),
        **{f"favor-{m}": Entry("sum", "favor", {"m": m}) for m in (64, 128, 512)},
        **{f"dpfp-{nu}": Entry("sum", "dpfp", {"nu": nu}) for nu in (1, 2, 3)},
    },
    2: {
        "dpfp-1-sum": Entry("sum", "dpfp", {"nu": 1}),
        "dpfp-1-delta": Entry("delta", "dpfp", {"nu": 1}),
        "dpfp-2-delta": Entry("delta", "dpfp", {"nu": 2}),
        "linear-delta": Entry("delta", "elu"),
        **{f"favor-{m}-delta": Entry("delta", "favor", {"m": m}) for m in (64, 128)},
        # At the learning rate and batch of the others it does not learn; the authors' code has these.
        "schlag2021": Entry("schlag2021", "tanh", batch=128, lr=1e-4),
        "schlag2021-dpfp": Entry("schlag2021", "dpfp", {"nu": 1}),
    },
}
"""The paper's models by setting and name."""


class RetrievalModel(nn.Module):
    """Reads ŷ (B, Q, S) out of a memory of L pairs: W_K, W_Q and the key embedding are what it learns.

    The columns of W_K that meet a one-hot value are kept as the rows of `value_table`, and a gate's logit is one more
    entry of the projected key.

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
        self.phi: FeatureMap = feature_map(entry.feature_map, d_key, **options).to(dtype)
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
        self.phi.redraw(generator)

    def forward(self, keys: Tensor | None, values: Tensor, queries: Tensor | None) -> Tensor:
        """Write the pairs and return what each query reads, ŷ (B, Q, S).

        Keys and values are (B, L), queries (B, Q), all of them numbers from 0 to S - 1; None stands for all S in order.
        """
        return self.read(*self.project(keys, values, queries))

    def project(
        self, keys: Tensor | None, values: Tensor, queries: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute q (B, Q, d_key), k (B, L, d_key), one-hot v (B, L, S) and the gate's logits (B, L, 0 or 1)."""
        v = F.one_hot(values, self.size).to(self.embedding.dtype)
        all_symbols = torch.arange(self.size, device=values.device).expand(len(values), -1)
        e_k, e_q = (F.embedding(all_symbols if x is None else x, self.embedding) for x in (keys, queries))
        W_k = torch.cat([self.key_weight, self.value_table.mT], -1)
        k = F.linear(torch.cat([e_k, v], -1), W_k, self.key_bias)
        return F.linear(e_q, self.query_weight, self.query_bias), k[..., : self.d_key], v, k[..., self.d_key :]

    def read(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """Return ŷ (B, Q, S), given what `project` returns."""
        if self.rule == "softmax":
            return F.scaled_dot_product_attention(q, k, v)
        q, k, beta = self.phi.map(q), self.phi.map(k), gate.sigmoid()
        if self.rule == "sum":  # Eqs. 17-19
            z = k.sum(1).unsqueeze(-1)
            return divide(q @ _write(k, v, "sum").W[:, 0], q @ z, self.read_eps)
        if self.rule == "delta":  # Eqs. 20-25, sum-normalised by Eq. 29
            q = divide(q, q.sum(-1, keepdim=True), self.read_eps)
            return q @ _write(sum_normalize(k), v, "delta", beta).W[:, 0]
        # Sec. 6.1.2. In the released code the norm is not clipped after the first write: a step of the delta rule.
        memory = _write(k[:, :1], v[:, :1], "delta", beta[:, :1])
        if k.shape[1] > 1:
            memory = _write(k[:, 1:], v[:, 1:], self.rule, beta[:, 1:], memory)
        return F.layer_norm(q @ memory.W[:, 0], (self.size,))


def _write(
    k: Tensor, v: Tensor, rule: str, beta: Tensor | None = None, memory: FastWeightState | None = None
) -> FastWeightState:
    """Return the memory, of one head, after values v (B, L, S) are written under keys k (B, L, d_dot)."""
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    return fast_weight_memory(k, k, v, rule=rule, beta=beta, state=memory)[1]


def half_squared_error(y: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute ½ Σ_j (v*_j - ŷ_j)² of each query, and the mean of them, weighted by `weights` (B, Q) if given.

    The values v* to be found are one-hot, with the ones at `targets` (B, Q).
    """
    error = y.scatter_add(-1, targets.unsqueeze(-1), -torch.ones_like(y[..., :1]))
    losses = error.square().sum(-1) / 2
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()


def divide(x: Tensor, by: Tensor, eps: float) -> Tensor:
    """Return x / (by + eps), or without eps x / by and 0 where by is 0."""
    return x / (by + eps) if eps else safe_divide(x, by)
