"""What a model remembers, as `generate` of transformers wants to handle it: one state, of one size for fast weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache


class FastWeightCache(Cache):
    """The state of a model after the tokens that it has read, for `past_key_values`.

    Assisted decoding takes tokens back. A state cannot be undone, so that while the past is recorded the state before
    the last call is kept with the tokens of that call: what stays of them is read again before the next ones.

    Attributes:
        state: what the model returned; None before its first token.
        length: tokens read, padding included.
    """

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: Any = None
        self.length = 0
        self.recording = False
        self._before: Any = None
        self._read: list[tuple[Tensor, Tensor | None]] = []
        self._again: list[tuple[Tensor, Tensor | None]] = []

    def take(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (B, T) that the model has to read now, those taken back and kept before the new ones."""
        self.length += tokens.shape[1]
        parts = [*self._again, (tokens, mask)]
        self._again = []
        if self.recording:
            self._before, self._read = self.state, parts
        return _joined(parts)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens were read."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return self.recording

    def activate_past_recording(self) -> None:
        """Keep what taking back the tokens of the next call needs."""
        self.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens, all of which were read by the last call."""
        remove = -tokens_to_remove
        if remove == 0:
            return
        read = sum(tokens.shape[1] for tokens, _ in self._read)
        if remove < 0 or remove > read:
            raise ValueError(
                f"crop takes back from 1 to {read} tokens here, given as a negative number, got {tokens_to_remove}; "
                "call activate_past_recording() before the tokens are read"
            )
        tokens, mask = _joined(self._read)
        kept = slice(read - remove)
        self.state, self.length = self._before, self.length - remove
        self._again = [(tokens[:, kept], None if mask is None else mask[:, kept])] if read > remove else []
        self._read = list(self._again)

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.length, self._before, self._read, self._again = None, 0, None, [], []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `beam_idx[i]` row i."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)
        self._again = [(x[beam_idx], None if mask is None else mask[beam_idx]) for x, mask in self._again]
        self._read = []

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if rows := self._rows:
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    @property
    def _rows(self) -> int:
        if self.state is None:
            return len(self._again[0][0]) if self._again else 0
        position = getattr(self.state, "position", None)
        return len(self.state.past.position if position is None else position)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the cache that was given; another kind is refused."""
        if not isinstance(given, cls):
            raise TypeError(
                "past_key_values must be a FastWeightCache, which a call with use_cache=True returns, "
                f"got {type(given).__name__}"
            )
        return given


def _joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Return tokens (B, T) and masks of several calls as those of one; None where nothing is padding."""
    tokens = torch.cat([x for x, _ in parts], 1)
    if all(mask is None for _, mask in parts):
        return tokens, None
    return tokens, torch.cat([torch.ones_like(x, dtype=torch.bool) if mask is None else mask for x, mask in parts], 1)
