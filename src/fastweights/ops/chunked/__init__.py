"""The family's recurrence in chunks, in plain PyTorch: matrix products inside a chunk, one state between chunks.

With chunk-start state W_0, Γ[t, s] = a_{s+1} ⋯ a_t and γ_t = a_1 ⋯ a_t, a chunk of C steps is (see docs/maths.md)

    (I + A) U = diag(w) V - diag(e γ) K W_0        A[t, s] = e_t Γ[t, s] k_t·k_s for s < t
    Y   = diag(γ) Q W_0 + (Γ ∘ Q K^T) U            lower triangle, diagonal included
    W_C = γ_C W_0 + K~^T U                         K~ = diag(Γ[C, :]) K

Everything but the two products that touch W_0 runs for all chunks at once. The backward pass keeps the inputs and the
state before each chunk, and computes the rest again.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastweights.ops.causality import Tokens
from fastweights.ops.chunked.decays import decay_of, diagonal_blocks, total
from fastweights.ops.operator import ChunkedOperator, number_of_chunks


class Layout:
    """Tokens (B, T, H, ·) as chunks (G, H, C, ·): the first chunk of every sequence, then the second, and so on.

    Sequences stand in order of falling length, so that those with a j-th chunk are the first `active[j]` rows of a
    state and the j-th chunks are one slice. Positions past a sequence's end are filled so that they change nothing.
    """

    def __init__(self, tokens: Tensor, chunk: int, cu_seqlens: Tensor | None) -> None:
        self.batch, self.time, self.chunk = tokens.shape[0], tokens.shape[1], chunk
        self.packed = cu_seqlens is not None
        if cu_seqlens is None:
            steps = -(-self.time // chunk)
            self.active = [self.batch] * steps
            self.chunk_starts = [(row, j * chunk) for j in range(steps) for row in range(self.batch)]
            return
        bounds = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        counts = [-(-lengths[i] // chunk) for i in order]
        self.active = [sum(count > j for count in counts) for j in range(counts[0] if counts else 0)]
        self.order = torch.tensor(order, device=tokens.device)
        firsts = [bounds[i] + j * chunk for j, n in enumerate(self.active) for i in order[:n]]
        self.chunk_starts = [(0, first) for first in firsts]
        ends = [bounds[i + 1] for n in self.active for i in order[:n]]
        first, end = torch.tensor([firsts, ends], dtype=torch.long, device="cpu").unsqueeze(-1)
        positions = first + torch.arange(chunk, device="cpu")
        inside = positions < end
        # Positions past an end read the filler row that `split` appends, and write to it in `join`.
        self.positions = positions.masked_fill(~inside, self.time).to(tokens.device)

    @property
    def slices(self) -> list[slice]:
        """Return where the chunks of each step are: all first chunks, all second ones, and so on."""
        slices, start = [], 0
        for n in self.active:
            slices.append(slice(start, start + n))
            start += n
        return slices

    def split(self, x: Tensor, dtype: torch.dtype, filler: float = 0.0) -> Tensor:
        """Cut tokens (B, T, H, ...) into chunks (G, H, C, ...)."""
        x = x.to(dtype)
        if self.packed:
            row = x.new_full((1, *x.shape[2:]), filler)
            return torch.cat([x[0], row])[self.positions].transpose(1, 2).contiguous()
        steps = len(self.active)
        if steps * self.chunk != self.time:
            x = pad(x, (0, 0) * (x.dim() - 2) + (0, steps * self.chunk - self.time), value=filler)
        x = x.unflatten(1, (steps, self.chunk)).transpose(0, 1)
        return x.transpose(2, 3).reshape(steps * self.batch, x.shape[3], self.chunk, *x.shape[4:])

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Join chunks (G, H, C, ...) to tokens (B, T, H, ...), contiguous."""
        x = x.transpose(1, 2)
        if self.packed:
            tokens = x.new_zeros((self.time + 1, *x.shape[2:]))
            tokens[self.positions] = x
            return tokens[: self.time].unsqueeze(0).to(dtype)
        x = x.unflatten(0, (len(self.active), self.batch)).transpose(0, 1).flatten(1, 2)[:, : self.time]
        return x.to(dtype, memory_format=torch.contiguous_format, copy=True)

    def sort(self, W: Tensor) -> Tensor:
        """Return a copy of the states, that of the longest sequence first."""
        return W.index_select(0, self.order) if self.packed else W.clone()

    def unsort(self, W: Tensor) -> Tensor:
        """Return the states in the caller's order again."""
        return torch.empty_like(W).index_copy_(0, self.order, W) if self.packed else W


@dataclass
class Chunks:
    """What forward and backward both need of every chunk, (G, H, C, ·) each; see the module's equations."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    e: Tensor | None
    w: Tensor | None
    log: bool

    def __post_init__(self) -> None:
        self.decay = decay_of(self.a, self.log)
        self.scores, *more = self.decay.products(self.k, self.q, *([] if self.e is None else [self.k]))
        self.q_faded, self.k_left = self.decay.faded(self.q), self.decay.left(self.k)
        self.written = self.v if self.w is None else self.w.unsqueeze(-1) * self.v
        if self.e is not None:
            e = self.e.unsqueeze(-1)
            self.keys = more[0]
            self.inverse = unit_lower_inverse(self.keys * e)
            self.k_faded = self.decay.faded(self.k)
            self.k_solved, self.written = self.inverse @ (e * self.k_faded), self.inverse @ self.written


def unit_lower_inverse(A: Tensor) -> Tensor:
    """Compute (I + A)^-1 (..., C, C) for the part of A below the diagonal, by matrix products.

    The inverse of [[P, 0], [R, S]] is [[P^-1, 0], [-S^-1 R P^-1, S^-1]]: blocks of 1, 2, 4, ... are joined in pairs,
    all pairs of all matrices at once. As accurate as substitution, which a CPU would do for one matrix after the other.
    """
    C = A.shape[-1]
    size = 1 << (C - 1).bit_length()
    if size != C:
        A = pad(A, (0, size - C, 0, size - C))
    inverse = torch.eye(size, dtype=A.dtype, device=A.device).expand(A.shape).clone()
    half = 1
    while half < size:
        pairs, below = diagonal_blocks(inverse, 2 * half), diagonal_blocks(A, 2 * half)[..., half:, :half]
        first, second = pairs[..., :half, :half], pairs[..., half:, half:]
        pairs[..., half:, :half] = -(second @ below @ first)
        half *= 2
    return inverse[..., :C, :C]


def _load(
    tokens: Tokens, cu_seqlens: Tensor | None, chunk: int, log: bool, dtype: torch.dtype
) -> tuple[Layout, Chunks]:
    layout = Layout(tokens[0], chunk, cu_seqlens)
    q, k, v = (layout.split(x, dtype) for x in tokens[:3])
    idle = (1.0 - log, 0.0, 0.0)
    a, e, w = (None if x is None else layout.split(x, dtype, fill) for x, fill in zip(tokens[3:], idle, strict=True))
    return layout, Chunks(q, k, v, a, e, w, log)


def chunk_length(D: int, M: int) -> int:
    """Return C: long enough for the matrix products, short enough that C x C work stays under D x M."""
    return 32 if max(D, M) <= 32 else 64


def _chunk_starts(q: Tensor, cu_seqlens: Tensor | None, chunk: int) -> list[tuple[int, int]]:
    return Layout(q, chunk, cu_seqlens).chunk_starts


def _finite(*results: Tensor) -> bool:
    """Return whether all these tensors are finite; True while a CUDA graph is captured, when they cannot be read."""
    if results[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return all(bool(x.sum().isfinite()) for x in results)


def forward(
    tokens: Tokens, W: Tensor, cu_seqlens: Tensor | None, log: bool, dtype: torch.dtype, keep: bool, chunk: int
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return y in `dtype`, the final W, with `keep` the state before each chunk, and whether y is finite."""
    q = tokens[0]
    with torch.autocast(q.device.type, enabled=False):
        layout, x = _load(tokens, cu_seqlens, chunk, log, W.dtype)
        W = layout.sort(W)
        count = number_of_chunks(q, chunk, cu_seqlens)
        before = W.new_zeros((count, *W.shape[1:]))
        for n, at in zip(layout.active, layout.slices, strict=True):
            before[at] = now = W[:n]
            u = x.written[at] if x.e is None else x.written[at] - x.k_solved[at] @ now
            W[:n] = x.decay.end(now, at) + x.k_left[at].mT @ u
        start = before[: x.k.shape[0]]
        u = x.written if x.e is None else x.written - x.k_solved @ start
        y = x.q_faded @ start + x.scores @ u
        kept = before if keep else before[:0].clone()
        return layout.join(y, dtype), layout.unsort(W), kept, _finite(y)


def backward(
    dy: Tensor, dW: Tensor | None, tokens: Tokens, before: Tensor, cu_seqlens: Tensor | None, log: bool, chunk: int
) -> tuple[list[Tensor], bool]:
    """Return the gradients of q, k, v, the coefficients there are and W, and whether those of q and k are finite."""
    q, k, v, a, e, w = tokens
    with torch.autocast(q.device.type, enabled=False):
        layout, x = _load(tokens, cu_seqlens, chunk, log, before.dtype)
        dy = layout.split(dy, before.dtype)
        W = before[: x.k.shape[0]]
        u = x.written if x.e is None else x.written - x.k_solved @ W

        # Backwards through the states: dW_after[g] is the gradient of the state that chunk g leaves.
        du = x.scores.mT @ dy
        from_reads = x.q_faded.mT @ dy
        dW_after = torch.empty_like(W)
        if dW is None:
            N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
            dW = before.new_zeros((N, *before.shape[1:]))
        else:
            dW = layout.sort(dW.to(before.dtype))
        for n, at in zip(reversed(layout.active), reversed(layout.slices), strict=True):
            dW_after[at] = later = dW[:n]
            du[at] += x.k_left[at] @ later
            dW[:n] = x.decay.end(later, at) + from_reads[at]
            if x.e is not None:
                dW[:n] -= x.k_solved[at].mT @ du[at]

        # Rows that are multiplied with the chunk's keys and, faded, with the state before it; and both gradients.
        rows, dproducts, dfaded = [x.q], [dy @ u.mT], [dy @ W.mT]
        dk_left, dright = u @ dW_after.mT, du
        grads: dict[str, Tensor] = {}
        if x.e is not None:
            # u = (I + A)^-1 right, so the gradient of right is (I + A)^-T du and that of A is -dright u^T.
            dright = x.inverse.mT @ du
            e_ = x.e.unsqueeze(-1)
            dA = (dright @ u.mT).neg_().tril_(-1)
            dread = -dright @ W.mT
            grads["e"] = (dA * x.keys).sum(-1) + (dread * x.k_faded).sum(-1)
            rows.append(x.k)
            dproducts.append(dA * e_)
            dfaded.append(dread * e_)
        ends = None
        if x.a is not None:
            dfade = total(row * d for row, d in zip(rows, dfaded, strict=True))
            dfade[..., -1, :] += (dW_after * W).sum(-1)
            ends = (dfade, dk_left * x.k)
        drows, dk, da = x.decay.gradients(x.k, rows, dproducts, ends)
        dq, *more = (drow + x.decay.faded(d) for drow, d in zip(drows, dfaded, strict=True))
        dk += x.decay.left(dk_left)
        for d in more:
            dk += d
        if da is not None:
            grads["a"] = da
        if x.w is not None:
            grads["w"] = (dright * x.v).sum(-1)
            dright = x.w.unsqueeze(-1) * dright

        result = [layout.join(d, t.dtype) for d, t in ((dq, q), (dk, k), (dright, v))]
        for name, gate in (("a", a), ("e", e), ("w", w)):
            if gate is not None:
                result.append(layout.join(grads[name], gate.dtype))
        return [*result, layout.unsort(dW)], _finite(dq, dk)


OPERATOR = ChunkedOperator("chunked", forward, backward, _chunk_starts, chunk_length)
recurrence = OPERATOR.recurrence
