"""A prepared corpus of sentence pairs, mapped from its files, and batches of them.

B pairs, S source and T target tokens. Any batch of any epoch can be had without those before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fastweights.common.tables import at_least_one, look_up
from fastweights.data.manifest import DataError, fingerprint, finished
from fastweights.data.pairs.bpe import BOS, EOS, PAD, PairTokenizer

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class ParallelSplit:
    """Sentence pairs by number, as token numbers without specials."""

    def __init__(self, name: str, folder: Path, entry: dict[str, Any], dtype: str, tokenizer: PairTokenizer) -> None:
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
        return self.tokens("source", np.array([number]))

    def target(self, number: int) -> np.ndarray:
        """Return the token numbers of a target sentence."""
        return self.tokens("target", np.array([number]))

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
            return [self.tokenizer.decode(self.tokens(side, np.array([number]))) for number in range(self._size)]
        # Only \n ends a line.
        return self._path(f"{side}_text").read_bytes().decode().removesuffix("\n").split("\n")

    def batches(self, max_tokens: int, **options: Any) -> "PairBatches":
        """Cut for training and evaluation; the options are those of `PairBatches`."""
        return PairBatches(self, max_tokens, **options)


class PairBatch(NamedTuple):
    """Pairs for a model that predicts each target token from the source and the target tokens before it.

    Args:
        source: (B, S) int64, the sentence and EOS, then padding.
        source_mask: (B, S) bool, False at padding.
        target_in: (B, T) int64, BOS and the sentence.
        target_out: (B, T) int64, the sentence and EOS.
        target_mask: (B, T) bool, False at padding: what is not scored.
    """

    source: Tensor
    source_mask: Tensor
    target_in: Tensor
    target_out: Tensor
    target_mask: Tensor


class PairBatches:
    """The pairs of a split in batches whose padded source and padded target have at most `max_tokens` tokens each.

    In every epoch the pairs are sorted by length, equals in a new order, cut into batches, and the batches shuffled.
    Order and cuts follow from (seed, epoch) alone. Lengths are rounded up to a multiple of `pad_to`, and so is the
    number of pairs rounded down where there are as many, which keeps the number of shapes small.

    Args:
        max_length: leave out pairs with a side of more tokens than this, its EOS counted.
        shuffle: False for one and the same order by length in every epoch.
    """

    def __init__(
        self,
        split: ParallelSplit,
        max_tokens: int,
        *,
        seed: int = 0,
        max_length: int | None = None,
        shuffle: bool = True,
        pad_to: int = 8,
    ) -> None:
        at_least_one(max_tokens=max_tokens, pad_to=pad_to, max_length=max_length or 1)
        self.split, self.seed, self.shuffle, self.pad_to = split, seed, shuffle, pad_to
        lengths = np.stack((split.lengths("source"), split.lengths("target"))) + 1
        longest = lengths.max(axis=0)
        self._kept = np.flatnonzero(longest <= (max_length or longest.max()))
        if not len(self._kept):
            raise ValueError(f"no pair has at most max_length = {max_length} tokens; the shortest has {longest.min()}")
        self.left_out = len(split) - len(self._kept)
        padded = -(-lengths[:, self._kept] // pad_to) * pad_to
        self._keys = (padded[0], padded.max(axis=0))
        self._cuts = self._cut(np.sort(self._keys[1]), max_tokens)
        self._epoch, self._batches = -1, list[Integers]()

    def _cut(self, costs: Integers, max_tokens: int) -> Integers:
        """Find where batches end: costs[i] is what pair i of the sorted ones takes; the last decides for its batch."""
        if costs[-1] > max_tokens:
            raise ValueError(
                f"the longest pair takes {costs[-1]} padded tokens, max_tokens is {max_tokens}; "
                "raise it, or leave long pairs out with max_length"
            )
        ends, start = [0], 0
        while start < len(costs):
            most = costs[start : start + max_tokens // int(costs[start])]
            rows = int(np.searchsorted(most * np.arange(1, len(most) + 1), max_tokens, side="right"))
            if rows > self.pad_to and start + rows < len(costs):
                rows -= rows % self.pad_to
            start += rows
            ends.append(start)
        return np.array(ends)

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return len(self._cuts) - 1

    def rows(self, index: int) -> Integers:
        """Return the numbers, in the split, of the pairs of batch `index`."""
        if index < 0:
            raise IndexError(f"batch must be at least 0, got {index}")
        epoch = index // len(self) if self.shuffle else 0
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._order(epoch)
        return self._batches[index % len(self)]

    def _order(self, epoch: int) -> list[Integers]:
        draw = np.random.default_rng((self.seed, epoch))
        ties = draw.random(len(self._kept)) if self.shuffle else np.arange(len(self._kept))
        ranked = self._kept[np.lexsort((ties, *self._keys))]
        batches = [ranked[start:stop] for start, stop in zip(self._cuts[:-1], self._cuts[1:], strict=True)]
        return [batches[number] for number in draw.permutation(len(batches))] if self.shuffle else batches

    def batch_at(self, index: int, rank: int = 0, world: int = 1) -> PairBatch:
        """Return batch `index`, counted from the first of the first epoch; each rank has every `world`-th of its pairs.

        All ranks' parts are padded alike. A rank for which no pair is left has one whose target does not count.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank must be 0 … world - 1 = {world - 1}, got {rank}")
        whole = self.rows(index)
        mine = whole[rank::world]
        pairs = mine if len(mine) else whole[:1]
        source, source_mask = self._padded("source", whole, pairs)
        target_out, target_mask = self._padded("target", whole, pairs)
        target_in = np.full_like(target_out, PAD)
        target_in[:, 0] = BOS
        target_in[:, 1:] = np.where(target_mask[:, 1:], target_out[:, :-1], PAD)
        if not len(mine):
            target_mask[:] = False
        return PairBatch(*map(torch.from_numpy, (source, source_mask, target_in, target_out, target_mask)))

    def _padded(self, side: str, whole: Integers, pairs: Integers) -> tuple[Integers, np.ndarray]:
        """Return sentences with EOS and padding (B, L) of `pairs`, and where they are not padding."""
        lengths = self.split.lengths(side)
        width = -(-(int(lengths[whole].max()) + 1) // self.pad_to) * self.pad_to
        size, place = lengths[pairs][:, None], np.arange(width)
        ids = np.full((len(pairs), width), PAD, dtype=np.int64)
        ids[place < size] = self.split.tokens(side, pairs)
        ids[place == size] = EOS
        return ids, place <= size

    def __iter__(self) -> Iterator[PairBatch]:
        """Yield the first epoch."""
        return (self.batch_at(index) for index in range(len(self)))


@dataclass(frozen=True)
class ParallelCorpus:
    """Splits of sentence pairs and the tokenizer that both languages share."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: PairTokenizer
    splits: dict[str, ParallelSplit]

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = False) -> Self:
        """Map a finished corpus: its sizes must be those of the manifest, and with `verify` every checksum too."""
        folder = Path(folder)
        manifest = finished(folder, "pairs", verify)
        tokenizer = PairTokenizer.load((folder / manifest["vocabulary"]["file"]).read_bytes())
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
