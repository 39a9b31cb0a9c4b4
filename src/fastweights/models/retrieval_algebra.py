"""Exact short cuts for retrieval: what the last query reads, without ever building the memory.

A read-out is linear in the values, y = Σ_t a_t v_t. These functions compute the coefficients a. Each has its gradient
written out, and none waits for the device, so that all can be recorded in a CUDA graph. B sequences, L pairs, Q
queries, S keys and as many values, d = d_key, D = d_dot.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Projection(Function):
    """Keys' projections for all S symbols (S, ·), and those of the queried symbols (B Q, d).

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
    """W_K [e(k); v] (B, L, ·) from the projections of all keys and all values: a sum of two looked-up rows."""
    by_value = values_table.index_select(0, values.flatten()).unflatten(0, values.shape)
    if keys is None:
        return by_value + keys_table
    return by_value + keys_table.index_select(0, keys.flatten()).unflatten(0, keys.shape)


def unpair(d: Tensor, keys: Tensor | None, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The gradients of both tables from that of `pair`."""
    rows = d.flatten(0, 1)
    by_value = d.new_zeros(size, d.shape[-1]).index_add_(0, values.flatten(), rows)
    if keys is None:
        return d.sum(0), by_value
    return torch.zeros_like(by_value).index_add_(0, keys.flatten(), rows), by_value


@cache
def _dpfp_neighbours(d: int, nu: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """H and D (d, d) such that H + D ∘ σσᵀ counts the pairs (i, i') whose features multiply, in both orders."""
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
    """φ(k_t)·φ(q) for FAVOR+ (Eqs. 31-32) and one query a sequence, (B, L).

    That is Σ_r cosh(r·(k + q)) exp(-(|k|² + |q|²)/2) / m: key and query share one exponential. The random vectors, the
    m rows of R, meet the tables and not the pairs.
    """

    @staticmethod
    def forward(
        ctx: Any, keys_table: Tensor, values_table: Tensor, q: Tensor, keys: Tensor | None, values: Tensor, R: Tensor
    ) -> Tensor:
        k = pair(keys_table, values_table, keys, values)
        squares = (k.square().sum(-1) + q.square().sum(-1, keepdim=True)).unsqueeze(-1) / 2
        along = pair(keys_table @ R.mT, values_table @ R.mT, keys, values).add_((q @ R.mT).unsqueeze(1))
        # Below e^-87 float32 has no full numbers, and a CPU is slow to find that out.
        rising, falling = (x.clamp_(min=-87).exp_() for x in (along - squares, along.neg_().sub_(squares)))
        scores = (rising.sum(-1) + falling.sum(-1)) / (2 * len(R))
        ctx.save_for_backward(k, q, R, rising.sub_(falling), scores, keys, values)
        ctx.size = len(keys_table)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
        k, q, R, slope, scores, keys, values = ctx.saved_tensors
        d_along = slope * (d_scores / (2 * len(R))).unsqueeze(-1)
        d_squares = -(d_scores * scores)
        by_key, by_value = unpair(k * d_squares.unsqueeze(-1), keys, values, ctx.size)
        along_key, along_value = unpair(d_along, keys, values, ctx.size)
        d_q = torch.addmm(q * d_squares.sum(-1, keepdim=True), d_along.sum(1), R)
        return torch.addmm(by_key, along_key, R), torch.addmm(by_value, along_value, R), d_q, None, None, None


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


class ClippedDeltaRead(Function):
    """Coefficients a (B, Q, L) of the read-out under the rule of Schlag et al. (2021), Sec. 6.1.2.

    That rule is a delta step followed, except for the first, by W / max(1, ||W||_F). Divisions only scale what was
    written before, so beside the delta rule the norms are all it needs. With N the strictly lower part of K Kᵀ diag(β)
    and R = (1 + N)^-1, the delta rule alone has a = Rᵀ diag(β) K q, and R V is what each step finds to change,
    e_t = v_t - v̄_t. The write of step r counts by w_r, the product of the scales since, and with κ = |k_t|²

        ||W||² + 2 β_t e·v_t + (β_t² κ_t - 2 β_t) |e|²

    is the squared norm after the write, and min(1, ·) of it after the division. The scan runs over these numbers, L of
    them a sequence, and never over a matrix. Its adjoint is linear in them: one triangular system.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, beta: Tensor, q: Tensor, values: Tensor, size: int) -> Tensor:
        B, L = values.shape
        gram = k @ k.mT
        identity = torch.eye(L, dtype=k.dtype, device=k.device).expand_as(gram)
        # Solved transposed, because the solver's result is column-major.
        system = gram * beta.unsqueeze(-1)
        R = torch.linalg.solve_triangular(system, identity, upper=True, unitriangular=True).mT
        square = beta**2 * gram.diagonal(dim1=1, dim2=2) - 2 * beta
        # In the scan sequences come last: the first t steps are then one piece of memory.
        rows, index = R.permute(1, 2, 0).contiguous(), values.mT.contiguous()
        linear, quadratic = ((2 * beta).mT.contiguous(), square.mT.contiguous())
        w, norm = torch.ones_like(linear), torch.zeros_like(linear[0])
        errors = k.new_zeros(L, size, B)
        norms, scales = torch.empty_like(linear), torch.ones_like(linear)
        for t, (error, written, scale) in enumerate(zip(errors, norms, scales, strict=True)):
            so_far = w[: t + 1]
            error.scatter_add_(0, index[: t + 1], rows[t, : t + 1] * so_far)
            torch.addcmul(norm, linear[t], error.gather(0, index[t : t + 1]).squeeze(0), out=written)
            written.addcmul_(quadratic[t], (error * error).sum(0))
            norm = written
            if t:
                norm = written.clamp(max=1)
                so_far.mul_(torch.rsqrt(written.clamp(min=1), out=scale))
        read = k @ q.mT
        a = (read * beta.unsqueeze(-1)).mT @ R
        e = errors.permute(2, 0, 1).contiguous()
        ctx.save_for_backward(k, beta, q, values, gram, R, square, norms.mT, scales.mT, e, w.mT, read, a)
        return a * w.mT.unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        k, beta, q, values, gram, R, square, norms, scales, e, w_end, read, a = ctx.saved_tensors
        L, at = values.shape[1], values.unsqueeze(-1)
        clipped = norms > 1
        clipped[:, 0].fill_(False)
        below = torch.ones(L, L, dtype=k.dtype, device=k.device).tril_(-1)
        # Weight of write r when step t comes, (B, t, r): the product of the scales from r to t - 1.
        w = torch.addcmul(torch.ones_like(below), scales.roll(1, -1).unsqueeze(-1) - 1, below).cumprod(1)
        # Derivative of step t's squared norm by R_tr, and by the log of the scale of step u < t, at which r ≤ u.
        by_error = (e * (2 * square).unsqueeze(-1)).scatter_add_(-1, at, (2 * beta).unsqueeze(-1))
        slope = by_error.gather(-1, at.mT.expand(-1, L, L)).mul_(w)
        by_scale = (slope * R).cumsum(-1)
        # Adjoint of the norms: λ_t = -own_t (d_t + Σ_{t'>t} by_scale_t't λ_t') + [not clipped] λ_{t+1}, d_t that of the
        # log of a scale, which reaches all writes up to t.
        d_logs = (d_out * a).sum(1).mul_(w_end).cumsum(-1)
        own = (0.5 / norms).masked_fill_(~clipped, 0)
        system = by_scale.mT * own.unsqueeze(-1)
        system.diagonal(1, 1, 2).sub_((~clipped[:, :-1]).to(system.dtype))
        right = (-own * d_logs).unsqueeze(-1)
        adjoint = torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True)

        d_a = d_out * w_end.unsqueeze(1)
        d_R = slope.mul_(adjoint).tril_(-1).baddbmm_(read * beta.unsqueeze(-1), d_a)
        d_N = (R.mT @ d_R @ R.mT).mul_(-below)
        d_weighted = R @ d_a.mT
        d_read = d_weighted * beta.unsqueeze(-1)
        adjoint, e_v, e_e = adjoint.squeeze(-1), e.gather(-1, at).squeeze(-1), (e * e).sum(-1)
        d_square = adjoint * e_e
        kappa = gram.diagonal(dim1=1, dim2=2)
        d_beta = 2 * adjoint * e_v + d_square * (2 * beta * kappa - 2)
        d_beta = d_beta + (d_N * gram).sum(1) + (d_weighted * read).sum(-1)
        d_gram = d_N.mul_(beta.unsqueeze(1))
        d_gram.diagonal(dim1=1, dim2=2).add_(d_square * beta**2)
        return (d_gram + d_gram.mT) @ k + d_read @ q, d_beta, d_read.mT @ k, None, None
