"""Exact short cuts for retrieval: what the queries read, without ever building the memory.

`ShortcutRetrievalModel` computes what `RetrievalModel` does, from its parameters. A read-out is linear in the values,
y = Σ_t a_t v_t, and most of the functions below compute the coefficients a. Each has its gradient written out, and none
waits for the device, so that all can be recorded in a CUDA graph. B sequences, L pairs, Q queries, S keys and as many
values, d = d_key, D = d_dot.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fastweights.feature_maps import DPFP, FAVOR
from fastweights.models.retrieval import RetrievalModel, divide
from fastweights.ops.normalization import safe_divide

# Steps of the delta rule solved at once: on a GPU one large system costs less than the launches of many small ones.
CHUNK = {"cpu": 32, "cuda": 128}


class ShortcutRetrievalModel(RetrievalModel):
    """`RetrievalModel` by exact short cuts: the same losses and gradients, up to rounding, for less work.

    Projections are made once for the S symbols and then looked up, one-hot values are never multiplied, and no memory
    is built.
    """

    def forward(self, keys: Tensor | None, values: Tensor, queries: Tensor | None) -> Tensor:
        """Compute ŷ (B, Q, S) as `RetrievalModel.forward` does."""
        table, q = self.project_symbols(queries)
        if self.rule == "softmax":
            return self._weigh_values(values, self._softmax_weights(table, q, keys, values))
        if self.rule == "sum":
            scores = self._kernel_scores(table, q, keys, values)
            return self._weigh_values(values, divide(scores, scores.sum(-1, keepdim=True), self.read_eps))
        k, beta = self._keys_and_gates(table, keys, values)
        q = self.phi.map(q)
        if self.rule == "delta":
            q = divide(q, q.sum(-1, keepdim=True), self.read_eps)
            q = q.expand(len(k), *q.shape[-2:])
            return self._weigh_values(values, DeltaRead.apply(k, beta, q, CHUNK[k.device.type]))
        errors, logs = ClippedWrites.apply(k, beta, values, self.size)
        # What is written at step t is scaled at t and at every later step.
        weights = beta * logs.flip(-1).cumsum(-1).flip(-1).exp()
        return F.layer_norm((q @ k.mT * weights.unsqueeze(1)) @ errors, (self.size,))

    def project_symbols(self, queries: Tensor | None) -> tuple[Tensor, Tensor]:
        """Project the S keys (S, d_key + gates), and queries: (B, Q, d_key), or (S, d_key) for all keys in order."""
        weights = self.embedding, self.key_weight, self.key_bias, self.query_weight, self.query_bias
        if queries is None:
            E, W_k, b_k, W_q, b_q = weights
            return F.linear(E, W_k, b_k), F.linear(E, W_q, b_q)
        table, q = Projection.apply(*weights, queries.flatten())
        return table, q.unflatten(0, queries.shape)

    def _weigh_values(self, values: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_t a_t v_t (B, Q, S), given the coefficients a (B, Q, L), without a product: values are one-hot."""
        B, Q, L = coefficients.shape
        empty = coefficients.new_zeros(B, Q, self.size)
        return empty.scatter_add(-1, values.unsqueeze(1).expand(B, Q, L), coefficients)

    def _softmax_weights(self, table: Tensor, q: Tensor, keys: Tensor | None, values: Tensor) -> Tensor:
        """Compute the softmax of k·q / √d_key over the pairs, k·q as a sum of two looked-up products of tables."""
        by_key, by_value = q @ table.mT, q @ self.value_table.mT
        B, L = values.shape
        values = values.unsqueeze(1).expand(B, q.shape[-2], L)
        scores = by_value.expand(B, -1, -1).gather(-1, values)
        if keys is not None:
            by_key = by_key.expand(B, -1, -1).gather(-1, keys.unsqueeze(1).expand_as(values))
        return ((scores + by_key) / math.sqrt(self.d_key)).softmax(-1)

    def _kernel_scores(self, table: Tensor, q: Tensor, keys: Tensor | None, values: Tensor) -> Tensor:
        """Compute φ(k_t)·φ(q), (B, Q, L)."""
        phi, tables = self.phi, (table, self.value_table)
        one_query = q.dim() == 3 and q.shape[1] == 1
        if one_query and isinstance(phi, DPFP):
            return DPFPScores.apply(*tables, q.squeeze(1), keys, values, phi.nu).unsqueeze(1)
        if one_query and isinstance(phi, FAVOR) and keys is None:
            # In parts that a CPU's caches hold.
            part = max(1, 2**20 // (phi.m * values.shape[1])) if q.device.type == "cpu" else len(q)
            parts = zip(q.squeeze(1).split(part), values.split(part), strict=True)
            return torch.cat([FAVORScores.apply(*tables, *each, phi.projection) for each in parts]).unsqueeze(1)
        return (phi.map(pair(*tables, keys, values)) @ phi.map(q).mT).mT

    def _keys_and_gates(self, table: Tensor, keys: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
        """Compute φ(k) (B, L, D), sum-normalised for the delta rule (Eq. 29), and β (B, L)."""
        if keys is None or self.size**2 >= values.numel():
            return self._map(pair(table, self.value_table, keys, values))
        # Fewer pairs can occur than do: map each of them once.
        k, beta = self._map((table.unsqueeze(1) + self.value_table).flatten(0, 1))
        at = (keys * self.size + values).flatten()
        k, beta = (x.index_select(0, at).unflatten(0, values.shape) for x in (k, beta))
        return k, beta

    def _map(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split projected pairs into φ(k) and β."""
        k, gate = rows.split([self.d_key, 1], -1)
        k = self.phi.map(k)
        if self.rule == "delta":
            # One division a key instead of one a feature; a key without features is not written.
            total = k.sum(-1, keepdim=True)
            k = k * safe_divide(torch.ones_like(total), total)
        return k, gate.squeeze(-1).sigmoid()


class Projection(Function):
    """Projections of all S keys (S, ·), and of the queried ones (B Q, d).

    Equivalent to `linear(E, W_k, b_k), linear(E[queries], W_q, b_q)`. Both share one gradient of the embedding E, where
    autograd would make two of its size and add them.
    """

    @staticmethod
    def forward(
        ctx: Any, E: Tensor, W_k: Tensor, b_k: Tensor, W_q: Tensor, b_q: Tensor, queries: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = E.index_select(0, queries)
        ctx.save_for_backward(E, W_k, W_q, queries, rows)
        return torch.addmm(b_k, E, W_k.mT), torch.addmm(b_q, rows, W_q.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_keys: Tensor, d_queries: Tensor) -> tuple[Tensor | None, ...]:
        E, W_k, W_q, queries, rows = ctx.saved_tensors
        d_E = (d_keys @ W_k).index_add_(0, queries, d_queries @ W_q)
        return d_E, d_keys.mT @ E, d_keys.sum(0), d_queries.mT @ rows, d_queries.sum(0), None


def pair(keys_table: Tensor, values_table: Tensor, keys: Tensor | None, values: Tensor) -> Tensor:
    """Look up W_K [e(k); v] (B, L, ·) as the sum of a row of the projected keys and one of the projected values."""
    by_value = values_table.index_select(0, values.flatten()).unflatten(0, values.shape)
    if keys is None:
        return by_value.add_(keys_table)
    return by_value.add_(keys_table.index_select(0, keys.flatten()).unflatten(0, keys.shape))


def unpair(d: Tensor, keys: Tensor | None, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of both tables, given that of `pair`."""
    rows = d.flatten(0, 1)
    by_value = d.new_zeros(size, d.shape[-1]).index_add_(0, values.flatten(), rows)
    if keys is None:
        return d.sum(0), by_value
    return torch.zeros_like(by_value).index_add_(0, keys.flatten(), rows), by_value


@cache
def _dpfp_neighbours(d: int, nu: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return H and D (d, d) such that H + D ∘ σσᵀ counts the pairs (i, i') whose features multiply, in both orders."""
    position = torch.arange(d)
    apart = position.unsqueeze(-1) - position
    same, other = ((x % (2 * d) >= 1) & (x % (2 * d) <= nu) for x in (apart, apart + d))
    same, other = (x.double() + x.double().mT for x in (same, other))
    return ((same + other) / 2).to(device, dtype), ((same - other) / 2).to(device, dtype)


class DPFPScores(Function):
    """φ(k_t)·φ(q) for DPFP-ν (Eq. 37) and one query a sequence, (B, L), from u = relu(k ∘ q) of size d alone.

    φ multiplies entries of r = [relu(x); relu(-x)], so φ(k)·φ(q) = Σ_j Σ_i p_i p_{i-j} with p = r(k) ∘ r(q). Of p's
    entries i and i + d only the one on the side of q_i's sign σ_i can differ from 0, and it is u_i. That leaves a
    quadratic form, ½ uᵀ A u, whose matrix depends on the signs of q only: A = H + D ∘ σσᵀ. The product with A is the
    gradient too.
    """

    @staticmethod
    def forward(
        ctx: Any, keys_table: Tensor, values_table: Tensor, q: Tensor, keys: Tensor | None, values: Tensor, nu: int
    ) -> Tensor:
        k = pair(keys_table, values_table, keys, values)
        H, D = _dpfp_neighbours(q.shape[-1], nu, q.dtype, q.device)
        sign = q.sign()
        u = (k * q.unsqueeze(1)).relu_()
        Au = u @ torch.addcmul(H, D, sign.unsqueeze(-1) * sign.unsqueeze(-2))
        Au = torch.ops.aten.threshold_backward(Au, u, 0)
        ctx.save_for_backward(k, q, Au, keys, values)
        ctx.size = len(keys_table)
        return u.mul_(Au).sum(-1) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
        k, q, Au, keys, values = ctx.saved_tensors
        d_u = Au * d_scores.unsqueeze(-1)
        d_q = (d_u * k).sum(1)
        d_k = d_u.mul_(q.unsqueeze(1))
        return *unpair(d_k, keys, values, ctx.size), d_q, None, None, None


class FAVORScores(Function):
    """φ(k_t)·φ(q) for FAVOR+ (Eqs. 31-32) and one query a sequence of all keys in order, (B, L).

    That is Σ_r cosh(r·(k + q)) exp(-(|k|² + |q|²)/2) / m: key and query share one exponential. The random vectors, the
    m rows of R, meet the tables and not the pairs.
    """

    @staticmethod
    def forward(ctx: Any, keys_table: Tensor, values_table: Tensor, q: Tensor, values: Tensor, R: Tensor) -> Tensor:
        k = pair(keys_table, values_table, None, values)
        offset = (k.square().sum(-1) + q.square().sum(-1, keepdim=True)).unsqueeze(-1) / -2
        along = pair(keys_table @ R.mT, values_table @ R.mT, None, values).add_((q @ R.mT).unsqueeze(1))
        # Below e^-87 float32 has no full numbers, and a CPU is slow to find that out.
        rising, falling = (x.clamp_(min=-87).exp_() for x in (offset + along, offset - along))
        scores = (rising.sum(-1) + falling.sum(-1)) / (2 * len(R))
        ctx.save_for_backward(k, q, R, rising.sub_(falling), scores, values)
        ctx.size = len(keys_table)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
        k, q, R, slope, scores, values = ctx.saved_tensors
        d_along = slope * (d_scores / (2 * len(R))).unsqueeze(-1)
        d_squares = -(d_scores * scores)
        by_key, by_value = unpair(k * d_squares.unsqueeze(-1), None, values, ctx.size)
        along_key, along_value = unpair(d_along, None, values, ctx.size)
        d_q = torch.addmm(q * d_squares.sum(-1, keepdim=True), d_along.sum(1), R)
        return torch.addmm(by_key, along_key, R), torch.addmm(by_value, along_value, R), d_q, None, None


class DeltaRead(Function):
    """Coefficients a (B, Q, L) of the delta rule's read-out W_L q = Σ_t a_t v_t, Eq. 24, by one vector run backwards.

    Unrolled, a_t = β_t c_t with c_t = k_t·g_t, where g starts as q and forgets what later writes replace:
    g_{t-1} = g_t - a_t k_t. A chunk of it is one triangular system in the keys' Gram matrix. With the gradient da the
    adjoint runs forwards: r_t = da_t - k_t·h_t, h_{t+1} = h_t + β_t r_t k_t, and

        dk_t = β_t r_t g_t - a_t h_t,    dβ_t = c_t r_t,    dq = h_{L+1}.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, beta: Tensor, q: Tensor, chunk: int) -> Tensor:
        g = q
        read: list[Tensor] = []
        carried: list[Tensor] = []
        for k_c, beta_c in zip(reversed(k.split(chunk, 1)), reversed(beta.split(chunk, 1)), strict=True):
            carried.insert(0, g)
            system = (k_c @ k_c.mT) * beta_c.unsqueeze(1)
            c = torch.linalg.solve_triangular(system, k_c @ g.mT, upper=True, unitriangular=True)
            read.insert(0, c)
            g = g - (c * beta_c.unsqueeze(-1)).mT @ k_c
        c = torch.cat(read, 1)
        ctx.save_for_backward(k, beta, c, *carried)
        ctx.chunk = chunk
        return (c * beta.unsqueeze(-1)).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_a: Tensor) -> tuple[Tensor | None, ...]:
        k, beta, c, *carried = ctx.saved_tensors
        h = torch.zeros_like(carried[0])
        d_k, d_beta = [], []
        parts = (x.split(ctx.chunk, 1) for x in (k, beta.unsqueeze(-1), c, d_a.mT))
        for k_c, beta_c, c_c, d_c, g in zip(*parts, carried, strict=True):
            system = (k_c @ k_c.mT) * beta_c.mT
            r = torch.linalg.solve_triangular(system, d_c - k_c @ h.mT, upper=False, unitriangular=True)
            a, weight = beta_c * c_c, beta_c * r
            later = (weight @ a.mT).triu_(1)
            d_k.append(weight @ g - a @ h - (later + later.mT) @ k_c)
            d_beta.append((c_c * r).sum(-1))
            h = h + weight.mT @ k_c
        return torch.cat(d_k, 1), torch.cat(d_beta, 1), h, None


class ClippedWrites(Function):
    """What the rule of Schlag et al. (2021) writes: errors E (B, L, S), and log of the scale after each write (B, L).

    The rule is a delta step, W + β e ⊗ k with e = v - W k, then, except for the first, W / max(1, ||W||_F). With w_tr
    the product of the scales from step r to t - 1, the memory that step t meets is Σ_r w_tr β_r e_r ⊗ k_r. So
    (1 + A) E = V with A_tr = w_tr β_r k_t·k_r below the diagonal, and the squared norm after the write is

        n_t = ||W||² + 2 β_t (e_t·v_t - |e_t|²) + β_t² |k_t|² |e_t|².

    The scan runs over the rows of A and never over a memory. Its numbers are those of the memory and stay as small;
    without the scales inside, the same system outgrows float64 at a few hundred keys.

    Backwards, scales enter as a similarity, A = D N D^-1, and e_t's derivative by the log of the scale of step u < t is
    the partial sum Σ_{r≤u} (1 + A)^-1_tr v_r. That leaves one triangular system for the adjoint of the norms.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, beta: Tensor, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
        B, L = values.shape
        gram = k @ k.mT
        coupling = gram * beta.unsqueeze(1)
        square = beta**2 * gram.diagonal(dim1=1, dim2=2) - 2 * beta
        E = k.new_zeros(B, L, size).scatter_(-1, values.unsqueeze(-1), 1)
        linear, quadratic = (x.unsqueeze(-1).unbind(1) for x in (2 * beta, square))
        # w[:, t, r] for r ≤ t; each row is the one above it times the scale that came between.
        w, norm, norms = k.new_ones(B, L, L), k.new_zeros(B, 1), []
        for t in range(L):
            e = E[:, t]
            if t:
                row = (coupling[:, t, :t] * w[:, t, :t]).unsqueeze(1)
                e.unsqueeze(1).baddbmm_(row, E[:, :t], alpha=-1)
            norm = torch.addcmul(norm, linear[t], e.gather(-1, values[:, t : t + 1]))
            norm.addcmul_(quadratic[t], torch.linalg.vecdot(e, e).unsqueeze(-1))
            norms.append(norm)
            if t == 0:
                continue
            if t + 1 < L:
                torch.mul(w[:, t, : t + 1], norm.clamp(min=1).rsqrt_(), out=w[:, t + 1, : t + 1])
            norm = norm.clamp(max=1)
        n = torch.cat(norms, -1)
        ctx.save_for_backward(k, beta, values, gram, square, n, E, w)
        logs = n.clamp(min=1).log().div_(-2)
        logs[:, 0].zero_()
        return E, logs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_E: Tensor, d_logs: Tensor) -> tuple[Tensor | None, ...]:
        k, beta, values, gram, square, n, E, w = ctx.saved_tensors
        value, all_values = values.unsqueeze(-1), values.unsqueeze(1).expand_as(gram)
        clipped = n > 1
        clipped[:, 0].fill_(False)
        A = (gram * beta.unsqueeze(1) * w).tril_(-1)
        identity = torch.eye(A.shape[-1], dtype=k.dtype, device=k.device).expand_as(A)
        inverse = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)
        below = inverse.tril(-1)
        # Of n_t by e_t; then, by the log of the scale of step u < t, of n_t and of the loss through e_t.
        by_error = (E * (2 * square).unsqueeze(-1)).scatter_add_(-1, value, (2 * beta).unsqueeze(-1))
        by_scale = (by_error.gather(-1, all_values) * below).cumsum(-1).tril_(-1)
        d_scale = (d_E.gather(-1, all_values) * below).cumsum(-1).tril_(-1).sum(1) + d_logs
        # Adjoint of the norms: λ_u = -own_u (d_scale_u + Σ_{t>u} by_scale_tu λ_t) + [not clipped] λ_{u+1}
        own = (0.5 / n.clamp(min=1)).masked_fill_(~clipped, 0).unsqueeze(-1)
        system = by_scale.mT * own
        system.diagonal(1, 1, 2).sub_((~clipped[:, :-1]).to(system.dtype))
        right = -own * d_scale.unsqueeze(-1)
        adjoint = torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True)
        d_A = (inverse.mT @ (d_E + adjoint * by_error) @ E.mT).neg_().tril_(-1) * w
        adjoint, e_v, e_e = adjoint.squeeze(-1), E.gather(-1, value).squeeze(-1), (E * E).sum(-1)
        kappa = gram.diagonal(dim1=1, dim2=2)
        d_beta = adjoint * (2 * e_v + (2 * beta * kappa - 2) * e_e) + (d_A * gram).sum(1)
        d_gram = d_A.mul_(beta.unsqueeze(1))
        d_gram.diagonal(dim1=1, dim2=2).add_(adjoint * beta**2 * e_e)
        return (d_gram + d_gram.mT) @ k, d_beta, None, None
