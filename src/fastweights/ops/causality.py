"""Causality for all values: what is NaN or infinite at one token stays away from tokens that do not depend on it.

Backends that compute in chunks multiply by zero what must not count: later tokens, and whatever stood in a memory that
was emptied (a = 0). But 0 · NaN is NaN. So a result that is not finite is computed a second time with zeros in place of
everything that is not finite, and every token that depends on none of it takes the second result, which has the bits of
a call in which all was finite. Only calls whose results are not finite pay for that.

Where finite inputs overflow, tokens before that one in the same chunk may turn NaN, and so may gradients in that chunk.
While a CUDA graph is captured results cannot be looked at, and values that are not finite spread through products.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Tokens = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
# Row and time of the first token of each chunk, in the order in which a backend keeps the states before chunks.
ChunkStarts = Callable[[], list[tuple[int, int]]]


def forward(
    run: Callable[..., tuple[Tensor, Tensor, Tensor, bool]],
    chunk_starts: ChunkStarts,
    tokens: Tokens,
    W: Tensor,
    cu_seqlens: Tensor | None,
    log: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the final W and the states before chunks of `run(tokens, W, cu_seqlens, log, *settings)`.

    `run` returns these three and whether y is finite, as it never is where any input is not. `log` says that decays are
    logarithms.
    """
    y, W_end, before, finite = run(tokens, W, cu_seqlens, log, *settings)
    if finite:
        return y, W_end, before
    if tokens[0].shape[2] != tokens[2].shape[2]:
        return forward(run, chunk_starts, _with_all_heads(tokens), W, cu_seqlens, log, *settings)
    q, *written = tokens
    time = _Timeline(q, tokens[3], log, cu_seqlens)
    W_spoilt = time.place(time.starts, spoilt_states(W)[time.filled])
    spoilt = spoilt_tokens(*written) | W_spoilt & ~time.emptied
    while True:
        depends = time.reached_from(spoilt)
        unread = depends | spoilt_tokens(q)
        clean = (fill_tokens(q, unread), *(None if x is None else fill_tokens(x, depends) for x in written))
        y_clean, W_clean, before_clean, finite = run(clean, _finite(W), cu_seqlens, log, *settings)
        overflow = spoilt_tokens(y_clean) & ~unread
        if finite or not overflow.any():
            break
        # Finite inputs overflow. The first token of a sequence that does may be why others do: it alone is left out.
        spoilt |= overflow & ~time.anywhere_before(overflow)
    end_depends = W.new_ones(W.shape[:2], dtype=torch.bool)
    end_depends[time.filled] = depends[time.ends]
    before_depends = before.new_ones(before.shape[:2], dtype=torch.bool)
    if before.numel():
        chunks = _index(chunk_starts())
        before_depends[: len(chunks[0])] = (time.previous(depends) | W_spoilt)[chunks]
    return (
        _choose(unread, y, y_clean),
        _choose(end_depends, W_end, W_clean),
        _choose(before_depends, before, before_clean),
    )


def backward(
    run: Callable[..., tuple[list[Tensor], bool]],
    chunk_starts: ChunkStarts,
    dy: Tensor,
    dW: Tensor | None,
    tokens: Tokens,
    before: Tensor,
    cu_seqlens: Tensor | None,
    log: bool,
    *settings: Any,
) -> list[Tensor]:
    """Return the gradients of `run(dy, dW, tokens, before, cu_seqlens, log, *settings)`.

    `run` returns these, and whether those of q and k are finite, as they never are where any input is not.
    """
    grads, finite = run(dy, dW, tokens, before, cu_seqlens, log, *settings)
    if finite:
        return grads
    if (n := tokens[2].shape[2] // tokens[0].shape[2]) > 1:
        all_heads = _with_all_heads(tokens)
        dq, dk, *rest = backward(run, chunk_starts, dy, dW, all_heads, before, cu_seqlens, log, *settings)
        return [*(x.unflatten(2, (-1, n)).sum(3) for x in (dq, dk)), *rest]
    dy_, dW_, *tokens_, before_ = (None if x is None else _finite(x) for x in (dy, dW, *tokens, before))
    clean, _ = run(dy_, dW_, tokens_, before_, cu_seqlens, log, *settings)
    q, k, v, a, e, w = tokens
    time = _Timeline(q, a, log, cu_seqlens)
    chunks = _index(chunk_starts())
    state_spoilt = time.place(chunks, spoilt_states(before[: len(chunks[0])]))
    # Tokens whose memory, after or before them, depends on what is not finite.
    after = time.reached_from(spoilt_tokens(k, v, a, e, w) | state_spoilt & ~time.emptied)
    earlier = time.previous(after) | state_spoilt
    # And those for which the gradient of the memory does: what they read, or what a later token makes of the memory.
    erased = time.tokens if e is None else spoilt_tokens(k, e)
    passed = (erased if a is None else erased | spoilt_tokens(a)) & ~time.emptied
    end_spoilt = False if dW is None else spoilt_states(dW)[time.filled]
    later = time.reached_backwards_from(spoilt_tokens(q, dy) | time.place(time.ends, end_spoilt) | time.next(passed))
    depends = {
        "q": after | spoilt_tokens(dy),
        "k": after | later,
        "v": later | spoilt_tokens(k, w),
        "a": earlier | later | erased,
        "e": earlier & ~time.emptied | later | spoilt_tokens(k, a),
        "w": later | spoilt_tokens(k, v),
    }
    start_depends = before.new_ones(grads[-1].shape[:2], dtype=torch.bool)
    start_depends[time.filled] = (passed | later & ~time.emptied)[time.starts]
    present = [depends[name] for name, x in zip("qkvaew", tokens, strict=True) if x is not None]
    return [_choose(*choice) for choice in zip([*present, start_depends], grads, clean, strict=True)]


def _with_all_heads(tokens: Tokens) -> Tokens:
    """Return the same with a head of q and k for each head of v."""
    q, k, v, *gates = tokens
    n = v.shape[2] // q.shape[2]
    return q.repeat_interleave(n, 2), k.repeat_interleave(n, 2), v, *gates  # type: ignore[return-value]


class _Timeline:
    """Which tokens (B, T, H) can depend on which: those of one sequence between two times at which it is emptied."""

    def __init__(self, q: Tensor, a: Tensor | None, log: bool, cu_seqlens: Tensor | None) -> None:
        B, T, H, _ = q.shape
        bounds = [(row, 0, T) for row in range(B)]
        if cu_seqlens is not None:
            bounds = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
        # Sequences that have tokens, and the indices of their first and last ones.
        self.filled = [n for n, (_, start, end) in enumerate(bounds) if start < end]
        self.starts = _index([(bounds[n][0], bounds[n][1]) for n in self.filled])
        self.ends = _index([(bounds[n][0], bounds[n][2] - 1) for n in self.filled])
        self.tokens = torch.zeros(B, T, H, dtype=torch.bool, device=q.device)
        self.first = self.place(self.starts, True)
        self.emptied = self.tokens
        if a is not None:
            shut = (a.exp() if log else a) == 0
            self.emptied = shut if shut.dim() == 3 else shut.all(-1)

    def place(self, index: tuple[list[int], list[int]], values: Tensor | bool) -> Tensor:
        """Return (B, T, H) with `values` at these tokens, and False elsewhere."""
        placed = self.tokens.clone()
        placed[index] = values
        return placed

    def previous(self, x: Tensor) -> Tensor:
        """Return x at the token before; False at the first token of a sequence."""
        return x.roll(1, 1) & ~self.first

    def next(self, x: Tensor) -> Tensor:
        """Return x at the token after; False at the last token of a sequence."""
        return (x & ~self.first).roll(-1, 1)

    def reached_from(self, x: Tensor) -> Tensor:
        """Return where the memory after a token depends on a token in x."""
        return reached(x, self.first | self.emptied)

    def reached_backwards_from(self, x: Tensor) -> Tensor:
        """Return where the memory of a token in x depends on the memory after a token."""
        return reached(x.flip(1), (self.first | self.emptied).roll(-1, 1).flip(1)).flip(1)

    def anywhere_before(self, x: Tensor) -> Tensor:
        """Return where an earlier token of the sequence is in x."""
        return self.previous(reached(x, self.first))


def reached(x: Tensor, walls: Tensor) -> Tensor:
    """Return where, at a token or before it, there is one in x with no wall after it up to that token."""
    time = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
    return (x * time).cummax(1).values >= (walls * time).cummax(1).values.clamp(min=1)


def _index(positions: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [row for row, _ in positions], [t for _, t in positions]


def spoilt_tokens(*tensors: Tensor | None) -> Tensor:
    """Return the tokens (B, T, H) at which any of these (B, T, H) or (B, T, H, ·) is not finite."""
    spoilt = [~x.isfinite() for x in tensors if x is not None]
    return torch.stack([x if x.dim() == 3 else x.any(-1) for x in spoilt]).any(0)


def spoilt_states(W: Tensor) -> Tensor:
    """Return the states (·, H) of W (·, H, D, M) that are not finite."""
    return ~W.isfinite().flatten(2).all(-1)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0, 0, 0)


def fill_tokens(x: Tensor, where: Tensor) -> Tensor:
    """Return x (B, T, H) or (B, T, H, ·) with zeros at these tokens (B, T, H)."""
    return x.masked_fill(where if x.dim() == 3 else where.unsqueeze(-1), 0)


def _choose(depends: Tensor, plain: Tensor, clean: Tensor) -> Tensor:
    return plain.where(depends.reshape(*depends.shape, *(1,) * (plain.dim() - depends.dim())), clean)
