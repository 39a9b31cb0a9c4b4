"""Steps of decoding as CUDA graphs: one launch for a token instead of hundreds, where the state has one size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.common.cuda_graph import capture_after_warmup
from fastweights.common.tree import map_tensors, tensors_of


class CapturedStep:
    """`step(token, state)`, which gives some result and the next state, as a CUDA graph.

    Tokens and states of fewer rows than those of the capture are taken too. What comes back lies in the graph's memory
    until the next call. The graph reads the model's weights where they are: new values in the same place count, a model
    that was moved needs a new graph.
    """

    @torch.no_grad()
    @torch.inference_mode(False)
    def __init__(self, step: Callable[[Tensor, Any], tuple[Any, Any]], token: Tensor, state: Any) -> None:
        self._token, state = map_tensors(torch.clone, (token, state))
        self._inputs = tensors_of((self._token, state))
        self._replay = capture_after_warmup(partial(step, self._token, state), token.device)
        _, after = self._replay()
        if [x.shape for x in tensors_of(after)] != [x.shape for x in tensors_of(state)]:
            raise ValueError("the state grows with every token: its steps are not alike, and cannot be captured")

    @property
    def rows(self) -> int:
        """The most rows of tokens."""
        return len(self._token)

    def fits(self, token: Tensor, state: Any) -> bool:
        """Say whether they have the shapes of the capture, with at most as many rows."""
        inputs = tensors_of((token, state))
        return len(inputs) == len(self._inputs) and all(
            x.shape[1:] == place.shape[1:]
            and x.dtype == place.dtype
            # As many rows of tokens for a row of anything else: beams of a sentence.
            and len(x) * self.rows == len(place) * len(token) <= len(place) * self.rows
            for x, place in zip(inputs, self._inputs, strict=True)
        )

    def __call__(self, token: Tensor, state: Any) -> tuple[Any, Any]:
        """Return the result and the next state."""
        pairs = zip(self._inputs, tensors_of((token, state)), strict=True)
        # What a step leaves as it is, such as the memory of a source, is in its place already.
        moved = [(place[: len(x)], x) for place, x in pairs if place.data_ptr() != x.data_ptr()]
        torch._foreach_copy_([place for place, _ in moved], [x for _, x in moved])
        result, after = self._replay()
        counts = iter([len(x) for x in tensors_of(state)])
        return map_tensors(lambda x: x[: len(token)], result), map_tensors(lambda x: x[: next(counts)], after)
