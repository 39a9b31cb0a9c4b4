"""`RelativeAttention`, the attention of Transformer-XL: relative positions and a memory of the last segment."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.checks import check_dropout, check_dtype, check_input, check_token, head_size
from fastweights.layers.linear import Linear
from fastweights.layers.padding import PaddedState, attend, check_state, join_masks, visible
from fastweights.layers.positions import sinusoid
from fastweights.ops.state import register_state


@register_state
@dataclass(eq=False)
class SegmentMemory(PaddedState):
    """The last inputs of the layer, (B, S <= mem_len, d_model), cut off from the graph."""

    inputs: Tensor


class RelativeAttention(nn.Module):
    """Causal attention over a segment and the memory before it, by content and distance [Dai et al. 2019, Sec. 3.3].

    Equivalent to, for each head, with r_n the sinusoid of distance n,

        h = cat([state.inputs, x])                              # the last T of S tokens ask
        q, (k, v) = x @ W_q, split(h @ W_kv)                    # no bias
        for i, j in (all tokens i of x, all tokens j <= i of h):
            score[i, j] = ((q[i] + layer.u) @ k[j] + (q[i] + layer.v) @ (r[i - j] @ W_r)) / sqrt(d_head)
        y = concat_heads(softmax(score, -1) @ v) @ W_out
        state.inputs = h[-mem_len:].detach()

    A token thus sees what precedes it in its segment and `mem_len` tokens before the segment. Results do not depend on
    how a sequence is cut into segments as long as the memory reaches back to its start; gradients stop at the memory.

    Args:
        d_model: size of the input and output, even.
        n_heads: number of heads.
        d_head: size of queries, keys and values of a head; d_model / n_heads if None.
        mem_len: how many inputs to remember. `layer.mem_len` may be changed later, as Table 4 does to evaluate.
        dropout: share of the attention weights dropped in training.
        clamp_len: distances beyond this one count as this one; may be changed later too.
        bias: biases in the projections of x.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int | None = None,
        *,
        mem_len: int,
        dropout: float = 0.0,
        clamp_len: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, head_size(d_model, n_heads, d_head)
        if d_model % 2:
            raise ValueError(f"d_model must be even: half sines, half cosines of the distance; got {d_model}")
        if mem_len < 0:
            raise ValueError(f"mem_len must be at least 0 (0 remembers nothing), got {mem_len}")
        if clamp_len is not None and clamp_len < 1:
            raise ValueError(f"clamp_len must be at least 1, or None for no limit, got {clamp_len}")
        self.mem_len, self.clamp_len, self.dropout = mem_len, clamp_len, check_dropout(dropout)
        self.query = Linear(d_model, n_heads * self.d_head, bias=bias)
        self.key_value = Linear(d_model, 2 * n_heads * self.d_head, bias=bias)
        self.distance = Linear(d_model, n_heads * self.d_head, bias=False)
        self.out = Linear(n_heads * self.d_head, d_model, bias=bias)
        self.u = nn.Parameter(torch.empty(n_heads, self.d_head))
        self.v = nn.Parameter(torch.empty(n_heads, self.d_head))
        for parameter in (self.u, self.v):
            nn.init.normal_(parameter, std=0.02)

    def forward(
        self, x: Tensor, state: SegmentMemory | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, SegmentMemory]:
        """Attend over a whole sequence, or the next segment of one: x (B, T, d_model) -> y (B, T, d_model), state.

        `mask` (B, T) is False for padding, on either side: no token sees it, in this segment or a later one, and its
        output is 0. Padding between tokens of one sequence still adds to their distance and takes room in the memory.
        """
        x = check_input(x, self.d_model, mask)
        check_dtype(x, self.query)
        h, seen_mask = x, mask
        if state is not None:
            past = check_state(state, SegmentMemory, {"inputs": (self.d_model,)}, x)
            # Again, for a state from before `mem_len` was made smaller.
            remembered, past_mask = self._last(past.inputs), None if past.mask is None else self._last(past.mask)
            h = torch.cat([remembered, x], 1)
            seen_mask = join_masks(past_mask, remembered.shape[1], mask, x)
        heads = (self.n_heads, self.d_head)
        q = self.query(x).unflatten(-1, heads)
        k, v = self.key_value(h).unflatten(-1, (2, *heads)).unbind(-3)
        scores = self._distance_scores(q, h.shape[1], seen_mask)
        y = attend(q + self.u, k, v, scores, self.dropout if self.training else 0.0)
        y = self.out(y.flatten(-2))
        y = y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0)
        # A copy: it holds no more than it needs, and the caller may change x in place.
        return y, SegmentMemory(
            self._last(h).detach().clone(), mask=None if seen_mask is None else self._last(seen_mask).clone()
        )

    def step(self, x: Tensor, state: SegmentMemory | None = None) -> tuple[Tensor, SegmentMemory]:
        """Attend from one token to the `mem_len` before it and itself: x (B, d_model) -> y (B, d_model), state."""
        y, state = self(check_token(x, self.d_model), state)
        return y.squeeze(1), state

    def _distance_scores(self, q: Tensor, S: int, mask: Tensor | None) -> Tensor:
        """Compute (q_i + v)·W_r r_{i-j} / sqrt(d_head), -inf where j is out of sight: (B, H, T, S)."""
        T = q.shape[1]
        distances = torch.arange(S - 1, -1, -1, device=q.device)
        if self.clamp_len is not None:
            distances = distances.clamp(max=self.clamp_len)
        r = self.distance(sinusoid(distances, self.d_model, self.distance.weight.dtype))
        r = r.unflatten(-1, (self.n_heads, self.d_head))
        scores = torch.einsum("bihd, nhd -> bhin", (q + self.v) * self.d_head**-0.5, r)
        return shift(scores).masked_fill(~visible(T, S, mask, True, q.device), -torch.inf)

    def _last(self, tensor: Tensor) -> Tensor:
        return tensor[:, max(0, tensor.shape[1] - self.mem_len) :]

    def extra_repr(self) -> str:
        """Return what print(layer) shows."""
        return (
            f"n_heads={self.n_heads}, d_head={self.d_head}, mem_len={self.mem_len}, "
            f"clamp_len={self.clamp_len}, dropout={self.dropout}"
        )


def shift(scores: Tensor) -> Tensor:
    """Turn scores (..., T, S) by distance S-1, ..., 0 into scores by token j: entry (i, j) has distance S-T+i-j.

    Row i is to move T - 1 - i places to the left. With one more column, read as one long row, that is the same as
    dropping the first T numbers: the first of S + 1 rows of T. Entries for tokens in the future have no meaning.
    """
    T, S = scores.shape[-2:]
    return F.pad(scores, (1, 0)).reshape(*scores.shape[:-2], S + 1, T)[..., 1:, :].reshape(scores.shape)
