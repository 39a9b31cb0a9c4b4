"""Steps of decoding as CUDA graphs: one launch for a token instead of hundreds, where the state has one size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.common.tree import map_tensors, tensors_of


def capture(work: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """What repeats `work` on the same memory, and where its results then lie."""
    # What autocast keeps from one call to the next is not the graph's, and would be gone when it is replayed.
    precision = torch.autocast(
        "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
    )
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(here)
    with precision, torch.cuda.stream(side):
        # Kernels are compiled and checked, and libraries prepare themselves, before anything is recorded.
        for _ in range(2):
            work()
        with torch.cuda.graph(graph, stream=side):
            result = work()
    here.wait_stream(side)
    return graph.replay, result


class RecordedStep:
    """`step(token, state)`, which gives some result and the next state, as a CUDA graph.

    Tokens and states of fewer rows than those it was recorded with are taken too. What comes back lies in the graph's
    memory until the next call. The graph reads the model's weights where they are: new values in the same place count,
    a model that was moved needs a new graph.
    """

    @torch.no_grad()
    @torch.inference_mode(False)
    def __init__(self, step: Callable[[Tensor, Any], tuple[Any, Any]], token: Tensor, state: Any) -> None:
        self._token, self._state = map_tensors(torch.clone, (token, state))
        self._places = tensors_of((self._token, self._state))
        self._replay, (self._result, self._after) = capture(partial(step, self._token, self._state), token.device)
        if [x.shape for x in tensors_of(self._after)] != [x.shape for x in tensors_of(self._state)]:
            raise ValueError("the state grows with every token: its steps are not alike, and cannot be recorded")

    @property
    def rows(self) -> int:
        """The most rows of tokens."""
        return len(self._token)

    def fits(self, token: Tensor, state: Any) -> bool:
        """Whether they have the shapes of the recording, but for rows that are not there."""
        given = tensors_of((token, state))
        return len(given) == len(self._places) and all(
            x.shape[1:] == place.shape[1:]
            and x.dtype == place.dtype
            # As many rows of tokens for a row of anything else: beams of a sentence.
            and len(x) * self.rows == len(place) * len(token) <= len(place) * self.rows
            for x, place in zip(given, self._places, strict=True)
        )

    def __call__(self, token: Tensor, state: Any) -> tuple[Any, Any]:
        """The result and the next state."""
        pairs = zip(self._places, tensors_of((token, state)), strict=True)
        # What a step leaves as it is, such as the memory of a source, is in its place already.
        moved = [(place[: len(x)], x) for place, x in pairs if place.data_ptr() != x.data_ptr()]
        torch._foreach_copy_([place for place, _ in moved], [x for _, x in moved])
        self._replay()
        counts = iter([len(x) for x in tensors_of(state)])
        after = map_tensors(lambda x: x[: next(counts)], self._after)
        return map_tensors(lambda x: x[: len(token)], self._result), after
