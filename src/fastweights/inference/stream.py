"""Text through a language model as it comes, with what the model remembers kept, copied, rolled back and stored.

stream = Stream(model)
log_probs = stream.feed(vocabulary.encode("The quick brown"))      # (V,), of the next word
other = stream.fork()                                              # two futures of one past
stream.save("past.safetensors")                                    # Stream.load(model, ...) continues
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fastweights.common.tree import map_tensors
from fastweights.data.tokenizer import Tokenizer
from fastweights.inference.capture import CapturedStep
from fastweights.inference.compression import CompressedState, Compression
from fastweights.inference.snapshot import Snapshot, load_snapshots, save_snapshots
from fastweights.models.language_model import LanguageModel, LanguageModelState

# Tokens in one call of the model: a long text needs no more memory than this much of it.
_PIECE = 512


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

    Args:
        model: a language model that can stream.
        state: what a stream of the same model carries: a state, or a `snapshot()`.
        graph: read tokens that come one by one, the first of all apart, by a CUDA graph: for fast weights on a GPU. A
            fork captures its own.
        tokenizer: with it the stream can be fed text.
        snapshot_every: keep a snapshot whenever a multiple of this many tokens has been read; 0 for none.
        snapshot_last: keep the snapshots before the last calls of `feed`, up to this many.
        state_format: keep fast weights between calls in fewer bits: "bf16", "fp8" or "int8"; see `Compression`.
        error_feedback: keep what that rounding lost in as many bits again.
    """

    def __init__(
        self,
        model: LanguageModel,
        state: LanguageModelState | Snapshot | None = None,
        *,
        graph: bool = False,
        tokenizer: Tokenizer | None = None,
        snapshot_every: int = 0,
        snapshot_last: int = 0,
        state_format: str | None = None,
        error_feedback: bool = False,
    ) -> None:
        config = model.config
        if config.positions == "sinusoid" and config.position_direction == "backward":
            raise ValueError(
                "this model's positions run backward from the end of a window, so every new token would change all "
                "that was read before: it cannot stream. SlidingWindow reads the last tokens again for each new one; a "
                "model trained with positions 'none' streams"
            )
        weight = model.softmax.weight
        if graph and not (weight.is_cuda and config.mixer == "fast_weight"):
            raise ValueError(
                f"graph = True needs fast weights on a GPU, got mixer {config.mixer!r} on {weight.device}; leave it out"
            )
        if min(snapshot_every, snapshot_last) < 0:
            given = f"snapshot_every = {snapshot_every} and snapshot_last = {snapshot_last}"
            raise ValueError(f"numbers of snapshots must be at least 0, got {given}")
        self.model = model.eval()
        self._past = state if isinstance(state, Snapshot) else Snapshot(state)
        self._compression = self._choose_compression(state_format, error_feedback)
        self._graph, self._tokenizer = graph, tokenizer
        self._captured: CapturedStep | None = None
        self._every, self._last = snapshot_every, snapshot_last
        self._snapshots: dict[int, Snapshot] = {}
        # Where the calls began before which snapshots are kept.
        self._begins: list[int] = []
        # States of 16-bit models are kept in float32.
        self._dtype = torch.promote_types(weight.dtype, torch.float32)
        # Within a segment Transformer-XL looks further back than its memory; one token at a time it never does.
        self._piece = 1 if config.mixer == "relative" else _PIECE

    def _choose_compression(self, state_format: str | None, error_feedback: bool) -> Compression | None:
        if state_format is not None:
            if self.model.config.mixer != "fast_weight":
                raise ValueError(
                    f"state_format is for fast weights, got mixer {self.model.config.mixer!r}; leave it out"
                )
            return Compression(state_format, error_feedback)
        if error_feedback:
            raise ValueError("error_feedback = True is about a state_format, and none was given")
        # A snapshot in fewer bits is continued in as few.
        return self._past.state.compression if isinstance(self._past.state, CompressedState) else None

    @torch.no_grad()
    def feed(self, tokens: str | Sequence[int] | Tensor) -> Tensor:
        """Read tokens (T,) with T at least 1, or a text that is not empty; gives `log_probs`."""
        row = self._tokens(tokens)
        if self._graph and self._past.state is not None and len(row) == 1:
            self._keep_begin()
            log_probs = self._replay(row)
            self._keep_multiple()
            return log_probs
        for _ in self._read(row):
            pass
        return self.log_probs

    @torch.no_grad()
    def feed_each(self, tokens: str | Sequence[int] | Tensor) -> Tensor:
        """Read tokens as `feed` does, and return log p (T, V) of the word after each of them."""
        parts = [self.model.softmax.log_prob(hidden) for hidden in self._read(self._tokens(tokens))]
        return torch.cat(parts)

    def _tokens(self, tokens: str | Sequence[int] | Tensor) -> Tensor:
        if isinstance(tokens, str):
            if self._tokenizer is None:
                raise TypeError(
                    f"this stream takes token numbers, got the text {tokens[:20]!r}; Stream(model, tokenizer=...) "
                    "takes text too, and so does the stream of a model from fastweights.load"
                )
            if not tokens:
                raise ValueError("the text is empty, so there is nothing to read; feed at least one character")
            tokens = self._tokenizer.encode(tokens)
        return _row(tokens).to(self.model.softmax.weight.device)

    def _read(self, row: Tensor) -> Iterator[Tensor]:
        """Read a row piece by piece, and yield the hidden vectors (T, d_model) of each."""
        self._keep_begin()
        for piece in self._pieces(row):
            hidden, state = self.model(piece.unsqueeze(0), self._past.full_state(self._dtype))
            held = state if self._compression is None else self._compression.compress(state)
            # A copy: a view would keep the vectors of the whole piece.
            self._past = Snapshot(held, hidden[0, -1].clone())
            self._keep_multiple()
            yield hidden[0]

    def _pieces(self, row: Tensor) -> Iterator[Tensor]:
        """Cut a row where a call of the model or a snapshot is due."""
        position = self.position if self._every else 0
        while len(row):
            size = min(self._piece, self._every - position % self._every) if self._every else self._piece
            piece, row = row[:size], row[size:]
            position += len(piece)
            yield piece

    def _replay(self, token: Tensor) -> Tensor:
        state = self._past.full_state(self._dtype)
        if self._captured is None:
            self._captured = CapturedStep(self._step, token, state)
        (hidden, log_probs), state = self._captured(token, state)
        self._past = Snapshot(
            state if self._compression is None else self._compression.compress(state), hidden[0].clone()
        )
        return log_probs[0].clone()

    def _step(self, token: Tensor, state: LanguageModelState) -> tuple[tuple[Tensor, Tensor], LanguageModelState]:
        hidden, state = self.model(token.unsqueeze(1), state)
        return (hidden[:, 0], self.model.softmax.log_prob(hidden[:, 0])), state

    @property
    @torch.no_grad()
    def log_probs(self) -> Tensor:
        """log p (V,) of the next word."""
        if self._past.hidden is None:
            raise ValueError("nothing has been fed yet, so there is nothing to predict from; feed a token first")
        return self.model.softmax.log_prob(self._past.hidden)

    @property
    def position(self) -> int:
        """Tokens read."""
        return self._past.position

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self._past.nbytes

    def snapshot(self) -> Snapshot:
        """Return what the stream has of its past, to be rolled back to or to start other streams from."""
        if self._captured is None:
            return self._past
        # The next replay of the CUDA graph overwrites its results, and what is not compressed is among them.
        return Snapshot(map_tensors(torch.clone, self._past.state), self._past.hidden)

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Positions that the stream can be rolled back to, in order."""
        return tuple(sorted(self._snapshots))

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the states of all snapshots that are kept."""
        return sum(snapshot.nbytes for snapshot in self._snapshots.values())

    def roll_back(self, to: int | Snapshot) -> None:
        """Continue from a position of `snapshots`, or from a `snapshot()`, as if nothing had been fed since.

        On the CPU the same tokens, fed in the same parts, then give the same bits.
        """
        if isinstance(to, int):
            if to not in self._snapshots and to != self.position:
                kept = ", ".join(map(str, self.snapshots)) or "none: give snapshot_every or snapshot_last to Stream"
                raise ValueError(f"there is no snapshot at position {to}; those kept are at {kept}")
            to = self._snapshots.get(to, self._past)
        self._past = to
        position = self.position
        self._snapshots = {at: snapshot for at, snapshot in self._snapshots.items() if at <= position}
        self._begins = [at for at in self._begins if at <= position]

    def drop_snapshots(self, before: int | None = None) -> None:
        """Let go of all snapshots, or of those at positions below `before`."""
        self._snapshots = {at: x for at, x in self._snapshots.items() if before is not None and at >= before}
        self._begins = [at for at in self._begins if at in self._snapshots]

    def _keep_begin(self) -> None:
        """Keep a snapshot before a call of `feed`, and let go of the one that is too many calls ago."""
        if not self._last:
            return
        position = self.position
        self._snapshots[position] = self.snapshot()
        self._begins = [at for at in self._begins if at != position] + [position]
        while len(self._begins) > self._last:
            oldest = self._begins.pop(0)
            if not (self._every and oldest and oldest % self._every == 0):
                del self._snapshots[oldest]

    def _keep_multiple(self) -> None:
        if self._every and self.position % self._every == 0:
            self._snapshots[self.position] = self.snapshot()

    def fork(self) -> Self:
        """Return a second stream with the same past; neither sees what the other is fed from here on.

        States are shared, and nothing is copied but what a CUDA graph would overwrite: each stream replaces its own
        when it is fed.
        """
        other = copy(self)
        other._past, other._captured = self.snapshot(), None
        other._snapshots, other._begins = dict(self._snapshots), list(self._begins)
        return other

    def save(self, path: Path | str) -> None:
        """Write the past to a safetensors file, which `load` reads for the same model; other snapshots are left out."""
        self.save_all(path, {"stream": self})

    @classmethod
    def load(cls, model: LanguageModel, path: Path | str, **options: Any) -> Self:
        """Continue from what `save` wrote for a model of the same configuration; its weights are not compared.

        `options` are those of `Stream`.
        """
        streams = cls.load_all(model, path, **options)
        if len(streams) > 1:
            names = ", ".join(map(repr, streams))
            raise ValueError(f"{path} holds several streams ({names}); Stream.load_all reads them")
        return next(iter(streams.values()))

    @staticmethod
    def save_all(path: Path | str, streams: Mapping[str, Stream]) -> None:
        """Write the pasts of several streams of one model to a file, by name."""
        models = {id(stream.model): stream.model for stream in streams.values()}
        if len(models) != 1:
            raise ValueError(f"streams in one file must be of one model, got {len(models)} models")
        (model,) = models.values()
        save_snapshots(path, model, {name: stream._past for name, stream in streams.items()})

    @classmethod
    def load_all(cls, model: LanguageModel, path: Path | str, **options: Any) -> dict[str, Self]:
        """Continue all streams of a file by their names; `options` are those of `Stream`."""
        return {name: cls(model, snapshot, **options) for name, snapshot in load_snapshots(path, model).items()}


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

    def fork(self) -> Self:
        """Return a second window with the same past."""
        return copy(self)


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
    try:
        row = torch.as_tensor(tokens)
    except (TypeError, ValueError) as error:
        raise TypeError(f"tokens must be a text or whole word numbers, got {str(tokens)[:40]}") from error
    if row.dim() != 1 or not len(row):
        raise ValueError(f"tokens must be one row of at least one word number, got shape {tuple(row.shape)}")
    if row.is_floating_point() or row.dtype == torch.bool:
        raise TypeError(f"tokens must be whole word numbers, got {row.dtype}")
    return row.long()
