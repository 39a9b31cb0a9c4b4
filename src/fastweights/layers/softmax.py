"""`SoftmaxAttention`, the Transformer's attention with a growing cache: the baseline that forgets nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastweights.layers.checks import check_dropout, check_dtype, check_input, check_token, head_size
from fastweights.layers.linear import Linear
from fastweights.layers.padding import PaddedState, attend, check_state, join_masks, visible
from fastweights.ops.state import register_state


@register_state
@dataclass(eq=False)
class KeyValueState(PaddedState):
    """Keys and values of every token so far, each (B, S, H, d_head): Eqs. 5-6."""

    k: Tensor
    v: Tensor


class SoftmaxAttention(nn.Module):
    """Multi-head scaled dot-product attention: Eqs. 4-7 of the paper, scaled by 1/sqrt(d_head).

    Equivalent to, for each head and a causal layer,

        q, (k, v) = x @ W_q, split(x @ W_kv)                    # no bias
        k, v = cat([state.k, k]), cat([state.v, v])
        scores = q @ k.mT / sqrt(d_head)                        # (T, S): the last T of S tokens ask
        y = softmax(scores.masked_fill(ones(T, S).triu(S - T + 1) == 1, -inf), -1) @ v
        y = concat_heads(y) @ W_out

    Args:
        d_model: size of the input and output.
        n_heads: number of heads.
        d_head: size of queries, keys and values of a head; d_model / n_heads if None.
        bias: biases in the projections.
        dropout: share of the attention weights dropped in training.
        causal: False lets a token see all of its segment and of the cache.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int | None = None,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, head_size(d_model, n_heads, d_head)
        self.dropout, self.causal = check_dropout(dropout), causal
        self.query = Linear(d_model, n_heads * self.d_head, bias=bias)
        self.key_value = Linear(d_model, 2 * n_heads * self.d_head, bias=bias)
        self.out = Linear(n_heads * self.d_head, d_model, bias=bias)

    def forward(
        self, x: Tensor, state: KeyValueState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValueState]:
        """Attend over a whole sequence, or the next segment of one: x (B, T, d_model) -> y (B, T, d_model), state.

        `mask` (B, T) is False for padding, on either side: no token sees it, in this segment or a later one, and its
        output is 0. Gradients flow into the state.
        """
        x = check_input(x, self.d_model, mask)
        check_dtype(x, self.query)
        q = self.query(x).unflatten(-1, (self.n_heads, self.d_head))
        k, v = self.key_value(x).unflatten(-1, (2, self.n_heads, self.d_head)).unbind(-3)
        seen_mask = mask
        if state is not None:
            entry = (self.n_heads, self.d_head)
            past = check_state(state, KeyValueState, {"k": entry, "v": entry}, k)
            seen_mask = join_masks(past.mask, past.k.shape[1], mask, x)
            k, v = torch.cat([past.k, k], 1), torch.cat([past.v, v], 1)
        T, S = q.shape[1], k.shape[1]
        # SDPA has causality built in, and a single token sees everything before it: neither needs a mask.
        is_causal = self.causal and state is None and seen_mask is None
        unmasked = seen_mask is None and (is_causal or not self.causal or T == 1)
        sees = None if unmasked else visible(T, S, seen_mask, self.causal, x.device)
        y = attend(q, k, v, sees, self.dropout if self.training else 0.0, is_causal)
        y = self.out(y.flatten(-2))
        y = y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0)
        return y, KeyValueState(k, v, mask=seen_mask)

    def step(self, x: Tensor, state: KeyValueState | None = None) -> tuple[Tensor, KeyValueState]:
        """Attend from one token: x (B, d_model) -> y (B, d_model), state. Memory and time grow with the tokens seen."""
        y, state = self(check_token(x, self.d_model), state)
        return y.squeeze(1), state

    def extra_repr(self) -> str:
        """Return what print(layer) shows."""
        return f"n_heads={self.n_heads}, d_head={self.d_head}, dropout={self.dropout}, causal={self.causal}"
