"""Text through a language model as it comes, with what the model remembers kept, copied and stored.

stream = Stream(model)
log_probs = stream.feed(vocabulary.encode("The quick brown"))      # (V,), of the next word
other = stream.fork()                                              # two futures of one past
stream.save("past.safetensors")                                    # Stream.load(model, ...) continues
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fastweights.common.files import write_atomically
from fastweights.data.tokenizer import Tokenizer
from fastweights.inference.capture import CapturedStep
from fastweights.layers.mixers import MIXERS
from fastweights.models.language_model import LanguageModel, LanguageModelState

# Tokens in one call of the model: a long text needs no more memory than this much of it.
_PIECE = 512
_FORMAT = "1"


class Reader(Protocol):
    """What takes tokens and predicts the next: `Stream` and `SlidingWindow`."""

    def feed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return log p (V,) of the word after these tokens and all before them."""
        ...

    def fork(self) -> Self:
        """Return a second one with the same past and a future of its own."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held of the past."""
        ...


class Stream:
    """One text, fed in parts of any size: the result does not depend on where it is cut.

    Fast weights hold a state of one size however long the text, Transformer-XL one of at most `mem_len` inputs a layer,
    a Transformer without positions one that grows with every token. The model is put into evaluation mode.

    With `graph` tokens that come one by one, the first of all apart, are read by a CUDA graph: for fast weights on a
    GPU. A fork records its own. With a `tokenizer` it can be fed text.
    """

    def __init__(
        self,
        model: LanguageModel,
        state: LanguageModelState | None = None,
        *,
        graph: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        config = model.config
        if config.positions == "sinusoid" and config.position_direction == "backward":
            raise ValueError(
                "this model's positions run backward from the end of a window, so every new token would change all "
                "that was read before: it cannot stream. SlidingWindow reads the last tokens again for each new one; a "
                "model trained with positions 'none' streams"
            )
        device = model.softmax.weight.device
        if graph and not (device.type == "cuda" and config.mixer == "fast_weight"):
            raise ValueError(
                f"graph = True needs fast weights on a GPU, got mixer {config.mixer!r} on {device}; leave it out"
            )
        self.model = model.eval()
        self._state = state
        self._hidden: Tensor | None = None
        self._graph = graph
        self._tokenizer = tokenizer
        self._captured: CapturedStep | None = None
        # Within a segment Transformer-XL looks further back than its memory; one token at a time it never does.
        self._piece = 1 if config.mixer == "relative" else _PIECE

    @torch.no_grad()
    def feed(self, tokens: str | Sequence[int] | Tensor) -> Tensor:
        """Read tokens (T,) with T at least 1, or a text that is not empty; gives `log_probs`."""
        if isinstance(tokens, str):
            if self._tokenizer is None:
                raise TypeError(
                    f"this stream takes token numbers, got the text {tokens[:20]!r}; Stream(model, tokenizer=...) "
                    "takes text too, and so does the stream of a model from fastweights.load"
                )
            if not tokens:
                raise ValueError("the text is empty, so there is nothing to read; feed at least one character")
            tokens = self._tokenizer.encode(tokens)
        row = _row(tokens)
        if self._graph and self._state is not None and len(row) == 1:
            return self._replay(row, self._state)
        for piece in row.to(self.model.softmax.weight.device).split(self._piece):
            hidden, self._state = self.model(piece.unsqueeze(0), self._state)
            # A copy: a view would keep the vectors of the whole piece.
            self._hidden = hidden[0, -1].clone()
        return self.log_probs

    def _replay(self, token: Tensor, state: LanguageModelState) -> Tensor:
        token = token.to(self.model.softmax.weight.device)
        if self._captured is None:
            self._captured = CapturedStep(self._step, token, state)
        (hidden, log_probs), self._state = self._captured(token, state)
        self._hidden = hidden[0].clone()
        return log_probs[0].clone()

    def _step(self, token: Tensor, state: LanguageModelState) -> tuple[tuple[Tensor, Tensor], LanguageModelState]:
        hidden, state = self.model(token.unsqueeze(1), state)
        return (hidden[:, 0], self.model.softmax.log_prob(hidden[:, 0])), state

    @property
    @torch.no_grad()
    def log_probs(self) -> Tensor:
        """log p (V,) of the next word."""
        if self._hidden is None:
            raise ValueError("nothing has been fed yet, so there is nothing to predict from; feed a token first")
        return self.model.softmax.log_prob(self._hidden)

    @property
    def position(self) -> int:
        """Tokens read."""
        return 0 if self._state is None else int(self._state.position)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self._state is None else self._state.nbytes

    def fork(self) -> Stream:
        """Return a second stream with the same past; neither sees what the other is fed from here on."""
        other = Stream(self.model, None if self._state is None else self._state.clone(), graph=self._graph)
        other._hidden, other._tokenizer = self._hidden, self._tokenizer
        return other

    def save(self, path: Path | str) -> None:
        """Write the past to a safetensors file, which `load` reads for the same model."""
        from safetensors.torch import save

        if self._state is None or self._hidden is None:
            raise ValueError("nothing has been fed yet, so there is nothing to save")
        tensors = {
            f"{i}.{name}": x for i, layer in enumerate(self._state.layers) for name, x in layer.tensors().items()
        }
        tensors |= {"position": self._state.position, "hidden": self._hidden}
        metadata = {"stream": _FORMAT, "model": json.dumps(self.model.config.to_dict())}
        write_atomically(Path(path), save({name: x.contiguous().cpu() for name, x in tensors.items()}, metadata))

    @classmethod
    def load(cls, model: LanguageModel, path: Path | str, *, graph: bool = False) -> Self:
        """Continue from what `save` wrote for a model of the same configuration; its weights are not compared."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt", device=str(model.softmax.weight.device)) as file:
                metadata = file.metadata() or {}
                # Copies: in the file they begin anywhere, and some kernels round by where their numbers begin.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, it is no mapping
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file ({error})") from None
        if metadata.get("stream") != _FORMAT:
            raise ValueError(f"{path} holds {sorted(tensors)[:6]} …, not what Stream.save writes")
        _check_model(path, json.loads(metadata["model"]), json.loads(json.dumps(model.config.to_dict())))
        position, hidden = tensors.pop("position"), tensors.pop("hidden")
        layers: list[dict[str, Tensor]] = [{} for _ in model.blocks]
        for name, tensor in tensors.items():
            number, _, entry = name.partition(".")
            layers[int(number)][entry] = tensor
        kind = MIXERS[model.config.mixer].state
        stream = cls(model, LanguageModelState([kind(**named) for named in layers], position), graph=graph)
        stream._hidden = hidden
        return stream


class SlidingWindow:
    """One text through a model that cannot stream: each new word reads the last `length` tokens again.

    Memory is that of one window, and time for a word that of reading `length` words.
    """

    def __init__(self, model: LanguageModel, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1 token, got {length}")
        self.model, self.length = model.eval(), length
        self._tokens = torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def feed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Read tokens (T,) with T at least 1; log p (V,) of the next word from the last `length` of all so far."""
        self._tokens = torch.cat([self._tokens, _row(tokens).cpu()])[-self.length :]
        hidden, _ = self.model(self._tokens.unsqueeze(0).to(self.model.softmax.weight.device))
        return self.model.softmax.log_prob(hidden[0, -1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens kept."""
        return self._tokens.nbytes

    def fork(self) -> SlidingWindow:
        """Return a second window with the same past."""
        other = SlidingWindow(self.model, self.length)
        other._tokens = self._tokens
        return other


def open_reader(model: LanguageModel, length: int, carried: bool = False) -> Stream | SlidingWindow:
    """Open a `Stream` where the model can and was trained to look back for ever, or else a `SlidingWindow`.

    The steps of a stream of fast weights on a GPU are captured.

    Absolute positions beyond those of training, and more keys than a Transformer ever had before it, are out of what a
    model knows; fast weights without positions have no such limit, though limited context never taught them to use it.
    """
    config = model.config
    endless = config.mixer != "softmax" and (carried or config.positions == "none")
    if not endless:
        return SlidingWindow(model, length)
    return Stream(model, graph=config.mixer == "fast_weight" and model.softmax.weight.is_cuda)


def _row(tokens: Sequence[int] | Tensor) -> Tensor:
    row = torch.as_tensor(tokens)
    if row.dim() != 1 or not len(row):
        raise ValueError(f"tokens must be one row of at least one word number, got shape {tuple(row.shape)}")
    if row.is_floating_point() or row.dtype == torch.bool:
        raise TypeError(f"tokens must be whole word numbers, got {row.dtype}")
    return row.long()


def _check_model(path: Path | str, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [
        f"{name}: {before.get(name)!r} there, {now[name]!r} here" for name in now if before.get(name) != now[name]
    ]
    if differing:
        raise ValueError(f"{path} was saved from another model ({'; '.join(differing)})")
