"""A prepared corpus of sentence pairs, mapped from its files: what `fastweights data wmt14|parallel|numbers` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from fastweights.common.tables import look_up
from fastweights.data.manifest import DataError, fingerprint, finished
from fastweights.data.pairs.batches import Integers, PairBatch, PairBatches
from fastweights.data.pairs.bpe import BOS, EOS, PAD, UNK, Tokenizer

__all__ = ["BOS", "EOS", "PAD", "UNK", "PairBatch", "PairBatches", "ParallelCorpus", "ParallelSplit", "Tokenizer"]


class ParallelSplit:
    """Sentence pairs by number, as token numbers without specials."""

    def __init__(self, name: str, folder: Path, entry: dict[str, Any], dtype: str, tokenizer: Tokenizer) -> None:
        self.name, self.folder, self.tokenizer = name, folder, tokenizer
        self._files, self._size = entry["files"], int(entry["pairs"])
        self._ids, self._starts = {}, {}
        for side in ("source", "target"):
            tokens = self._files[side]["tokens"]
            # An empty file cannot be mapped.
            self._ids[side] = np.memmap(self._path(side), dtype, "r") if tokens else np.empty(0, dtype)
            self._starts[side] = np.memmap(self._path(f"{side}_starts"), np.uint64, "r")
            if len(self._starts[side]) != self._size + 1 or int(self._starts[side][-1]) != tokens:
                raise DataError(f"{self._path(f'{side}_starts')} does not fit the manifest; prepare the corpus again")

    def _path(self, key: str) -> Path:
        return self.folder / str(self._files[key]["file"])

    def __len__(self) -> int:
        return self._size

    def source(self, number: int) -> np.ndarray:
        """Return the token numbers of a source sentence."""
        return self._sentence("source", number)

    def target(self, number: int) -> np.ndarray:
        """Return the token numbers of a target sentence."""
        return self._sentence("target", number)

    def _sentence(self, side: str, number: int) -> np.ndarray:
        if not 0 <= number < self._size:
            raise IndexError(f"{self.name} has pairs 0 … {self._size - 1}, got {number}")
        starts = self._starts[side]
        return np.asarray(self._ids[side][int(starts[number]) : int(starts[number + 1])])

    def tokens(self, side: str, numbers: Integers) -> np.ndarray:
        """Return the token numbers of those sentences of a side, one after another; of a thousand in one go."""
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self._size:
            raise IndexError(f"{self.name} has pairs 0 … {self._size - 1}, got {numbers.min()} … {numbers.max()}")
        lengths = self.lengths(side)[numbers]
        before = np.cumsum(lengths) - lengths
        first = self._starts[side][numbers].astype(np.int64)
        return np.asarray(self._ids[side][np.repeat(first - before, lengths) + np.arange(lengths.sum())])

    @cached_property
    def _lengths(self) -> dict[str, Integers]:
        return {side: np.diff(starts.astype(np.int64)) for side, starts in self._starts.items()}

    def lengths(self, side: str) -> Integers:
        """Return the number of tokens of each sentence of a side, "source" or "target"."""
        return look_up(self._lengths, side, "side")

    @cached_property
    def sources(self) -> list[str]:
        """The source sentences as they were read."""
        return self._texts("source")

    @cached_property
    def targets(self) -> list[str]:
        """The target sentences as they were read: what translations are scored against."""
        return self._texts("target")

    def _texts(self, side: str) -> list[str]:
        if f"{side}_text" not in self._files:
            # Every text comes back from its tokens as it was; of the training text there is no other copy.
            return self.tokenizer.decode([self._sentence(side, number).tolist() for number in range(self._size)])
        # Only \n ends a line.
        return self._path(f"{side}_text").read_bytes().decode().removesuffix("\n").split("\n")

    def batches(
        self, max_tokens: int, *, seed: int = 0, max_length: int | None = None, shuffle: bool = True, pad_to: int = 8
    ) -> PairBatches:
        """Cut for training and evaluation: see `PairBatches`."""
        return PairBatches(self, max_tokens, seed=seed, max_length=max_length, shuffle=shuffle, pad_to=pad_to)


@dataclass(frozen=True)
class ParallelCorpus:
    """Splits of sentence pairs and the tokenizer that both languages share."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    splits: dict[str, ParallelSplit]

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = False) -> Self:
        """Map a finished corpus: its sizes must be those of the manifest, and with `verify` every checksum too."""
        folder = Path(folder)
        manifest = finished(folder, "pairs", verify)
        tokenizer = Tokenizer.load((folder / manifest["vocabulary"]["file"]).read_bytes())
        dtype = manifest["dtype"]
        splits = {n: ParallelSplit(n, folder, entry, dtype, tokenizer) for n, entry in manifest["splits"].items()}
        return cls(folder, manifest, tokenizer, splits)

    def split(self, name: str) -> ParallelSplit:
        """Return the split of that name: train, valid, and where there is one test."""
        return look_up(self.splits, name, "split")

    @property
    def fingerprint(self) -> str:
        """A name of these pairs and this tokenizer, wherever they lie, by which a run knows its corpus."""
        return fingerprint(self.manifest)

    @property
    def source_language(self) -> str:
        return str(self.manifest["languages"][0])

    @property
    def target_language(self) -> str:
        return str(self.manifest["languages"][1])
