"""A stream's step as a CUDA graph: one launch for a token instead of hundreds."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.models.language_model import LanguageModel, LanguageModelState


class RecordedStep:
    """One token after another from `state` on, for a model whose state has one size.

    The state lives in `self.state`, tensors of the graph that each call overwrites. The graph reads the model's weights
    where they are: new values in the same place count, a model that was moved to another device needs a new graph.
    """

    @torch.no_grad()
    def __init__(self, model: LanguageModel, state: LanguageModelState) -> None:
        self.state = state.clone()
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=state.position.device)

        def step() -> tuple[Tensor, Tensor, LanguageModelState]:
            hidden, after = model(self._token, self.state)
            return hidden[0, 0], model.softmax.log_prob(hidden[0, 0]), after

        side = torch.cuda.Stream(self._token.device)
        side.wait_stream(torch.cuda.current_stream(self._token.device))
        with torch.cuda.stream(side):
            # Kernels are compiled and checked, and libraries prepare themselves, before anything is recorded.
            for _ in range(2):
                after = step()[2]
            if [x.shape for x in _tensors(after)] != [x.shape for x in _tensors(self.state)]:
                raise ValueError(
                    f"the state of mixer {model.config.mixer!r} grows with every token: not to be recorded"
                )
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=side):
                self._hidden, self._log_probs, after = step()
                self.set(after)
        torch.cuda.current_stream(self._token.device).wait_stream(side)

    def set(self, state: LanguageModelState) -> None:
        """Go on from `state`, which is copied."""
        for mine, other in zip(_tensors(self.state), _tensors(state), strict=True):
            mine.copy_(other)

    def __call__(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """Read one token; the hidden vector (d_model,) after it, and log p (V,) of the next word."""
        self._token.copy_(token.view(1, 1))
        self._graph.replay()
        return self._hidden.clone(), self._log_probs.clone()


def _tensors(state: LanguageModelState) -> list[Tensor]:
    return [*(tensor for layer in state.layers for tensor in layer.tensors().values()), state.position]
