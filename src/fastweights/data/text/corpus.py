"""A prepared corpus for models: memory-mapped streams of token numbers, cut for training and for evaluation.

B rows, L tokens a segment or window, N tokens a stream. Everything is a view or an index of one tensor, in memory, on
disk or on a GPU, and any batch can be had without those before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fastweights.common.tables import at_least_one, look_up
from fastweights.data.manifest import SPLITS, DataError, fingerprint, finished
from fastweights.data.tokenizer import TOKENIZERS, Tokenizer

# PyTorch computes little in uint32; no vocabulary is so large that int32 reads it differently.
_DTYPES = {"uint16": torch.uint16, "uint32": torch.int32}


class Segment(NamedTuple):
    """Inputs and targets (B, L), int64, the targets being the next tokens; and whether an epoch begins here.

    `starts` (B, L) says which inputs begin a document, None in a stream that does not tell.
    """

    inputs: Tensor
    targets: Tensor
    starts_epoch: bool
    starts: Tensor | None = None


class Segments:
    """A stream cut to a multiple of `batch`, laid out in as many contiguous rows, and read in order L tokens at a time.

    Equivalent to

        rows = tokens[: N // B * B].view(B, N // B)
        inputs, targets = rows[:, i * L : (i + 1) * L], rows[:, i * L + 1 : (i + 1) * L + 1]

    for i = step % len(segments), where the last segment ends with the row. Every epoch has the same boundaries. Rank
    `rank` of `world` has its share of the rows, in order: the ranks' batches one below the other are the whole batch.
    """

    def __init__(
        self, tokens: Tensor, batch: int, length: int, rank: int = 0, world: int = 1, starts: Tensor | None = None
    ) -> None:
        mine = _share(batch, length, rank, world)
        if len(tokens) < 2 * batch:
            raise ValueError(
                f"{len(tokens):,} tokens do not give {batch} rows of 2 or more; "
                f"take a batch of at most {len(tokens) // 2}"
            )
        size = len(tokens) // batch

        def rows(stream: Tensor) -> Tensor:
            return stream[: size * batch].view(batch, size)[mine]

        self.rows, self.starts, self.length = rows(tokens), None if starts is None else rows(starts), length

    def __len__(self) -> int:
        """Count the steps of an epoch."""
        return -(-(self.rows.shape[1] - 1) // self.length)

    def batch_at(self, step: int) -> Segment:
        """Return the segment of a step, counted from the first of the first epoch."""
        if step < 0:
            raise IndexError(f"step must be at least 0, got {step}")
        start = step % len(self) * self.length
        stop = min(start + self.length, self.rows.shape[1] - 1)
        starts = None if self.starts is None else self.starts[:, start:stop]
        return Segment(self.rows[:, start:stop].long(), self.rows[:, start + 1 : stop + 1].long(), start == 0, starts)

    def __iter__(self) -> Iterator[Segment]:
        """Yield one epoch."""
        return (self.batch_at(step) for step in range(len(self)))

    @property
    def predictions(self) -> int:
        """Targets an epoch, in these rows."""
        return self.rows.shape[0] * (self.rows.shape[1] - 1)


class ShuffledSegments:
    """A stream cut into segments of L tokens that stand alone: each epoch in a new order, and cut at other places.

    Equivalent to

        draw = numpy.random.default_rng((seed, epoch))
        first, order = draw.integers(L), draw.permutation((N - L) // L)
        starts = first + L * order[i * B : (i + 1) * B]
        inputs, targets = tokens[starts + range(L)], tokens[starts + range(1, L + 1)]

    for i = step % len(segments). Segments that do not fill a batch are left out, others in each epoch. Ranks share a
    batch as those of `Segments` do.
    """

    def __init__(
        self,
        tokens: Tensor,
        batch: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        starts: Tensor | None = None,
    ) -> None:
        self._mine = _share(batch, length, rank, world)
        if seed < 0:
            raise ValueError(f"seed must be at least 0 for shuffled segments, got {seed}")
        # This many fit in wherever the first begins.
        self._count = (len(tokens) - length) // length
        if self._count < batch:
            remedy = f"take a batch of at most {self._count}" if self._count > 0 else "take shorter ones"
            raise ValueError(
                f"{len(tokens):,} tokens do not give {batch} segments of {length} that begin anywhere; {remedy}"
            )
        self.tokens, self.starts, self.batch, self.length, self.seed = tokens, starts, batch, length, seed
        self._range = torch.arange(length + 1, device=tokens.device)
        self._epoch, self._positions = -1, torch.empty(0)

    def __len__(self) -> int:
        """Count the steps of an epoch."""
        return self._count // self.batch

    def batch_at(self, step: int) -> Segment:
        """Return the segments of a step, counted from the first of the first epoch; `starts_epoch` is always False."""
        if step < 0:
            raise IndexError(f"step must be at least 0, got {step}")
        epoch, index = divmod(step, len(self))
        if epoch != self._epoch:
            self._epoch, self._positions = epoch, self._draw(epoch)
        positions = self._positions[index * self.batch : (index + 1) * self.batch][self._mine, None] + self._range
        tokens = self.tokens[positions].long()
        starts = None if self.starts is None else self.starts[positions[:, :-1]]
        return Segment(tokens[:, :-1], tokens[:, 1:], False, starts)

    def _draw(self, epoch: int) -> Tensor:
        """Draw where the segments of an epoch begin, in their order."""
        draw = np.random.default_rng((self.seed, epoch))
        first, order = draw.integers(self.length), draw.permutation(self._count)
        return torch.from_numpy(first + self.length * order).to(self.tokens.device)


class Window(NamedTuple):
    """Inputs (n, L) and the targets (n, k) of their last k positions, int64: only those are scored.

    `starts` (n, L) says which inputs begin a document, None in a stream that does not tell.
    """

    inputs: Tensor
    targets: Tensor
    starts: Tensor | None = None


class Windows:
    """Windows of L tokens every `stride` tokens, so that each prediction has a full context: Sec. 6.3's evaluation.

    The first window is scored at every position, each later one at its last `stride` only, and one that ends with the
    stream at what is left: N - 1 predictions, each target once and in order. `batch` windows come at a time; as they
    do not depend on each other this changes no result. With stride 1, equivalent to

        yield tokens[None, :L], tokens[None, 1 : L + 1]
        for i in range(1, N - L):
            yield tokens[None, i : i + L], tokens[None, i + L : i + L + 1]
    """

    def __init__(
        self, tokens: Tensor, length: int, stride: int = 1, batch: int = 1, starts: Tensor | None = None
    ) -> None:
        at_least_one(length=length, stride=stride, batch=batch)
        if stride > length:
            raise ValueError(
                f"stride {stride} would leave out tokens between windows of {length}; take at most {length}"
            )
        if len(tokens) < 2:
            raise ValueError(f"a stream of {len(tokens)} tokens has nothing to predict; 2 are needed")
        self.tokens, self.stride, self.batch = tokens, stride, batch
        self.predictions = len(tokens) - 1
        self.length = min(length, self.predictions)
        self._later = tokens[:-1].unfold(0, self.length, stride)[1:]
        self._scored = tokens[self.length + 1 :].unfold(0, stride, stride) if len(self._later) else tokens[:0, None]
        self._left = self.predictions - self.length - len(self._later) * stride
        self._starts = None if starts is None else Windows(starts, length, stride, batch)

    def __len__(self) -> int:
        """Count the batches, of which the first is the first window alone."""
        return 1 + -(-len(self._later) // self.batch) + (self._left > 0)

    def batch_at(self, number: int) -> Window:
        """Return batch `number`."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch must be 0 … {len(self) - 1}, got {number}")
        L = self.length
        if number == 0:
            inputs, targets = self.tokens[None, :L], self.tokens[None, 1 : L + 1]
        elif self._left and number == len(self) - 1:
            inputs, targets = self.tokens[None, -L - 1 : -1], self.tokens[None, -self._left :]
        else:
            chosen = slice((number - 1) * self.batch, number * self.batch)
            inputs, targets = self._later[chosen], self._scored[chosen]
        starts = None if self._starts is None else self._starts.batch_at(number).inputs.bool()
        return Window(inputs.long(), targets.long(), starts)

    def __iter__(self) -> Iterator[Window]:
        return (self.batch_at(number) for number in range(len(self)))


class TokenStream:
    """The tokens of a split, one after the other: a tensor (N,) of token numbers, mapped from its file at first.

    `starts` (N,) says which of them begin a document; `data.documents.mark_documents` finds out.
    """

    def __init__(self, tokens: Tensor, starts: Tensor | None = None) -> None:
        self.tokens, self.starts = tokens, starts

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: str | torch.device) -> "TokenStream":
        """Return the stream in the memory of a device, as int32."""
        starts = None if self.starts is None else self.starts.to(device)
        return TokenStream(self.tokens.to(torch.int32).to(device), starts)

    def segments(self, batch: int, length: int, *, rank: int = 0, world: int = 1) -> Segments:
        """Cut for training, and with batch 1 for evaluation with carried state: see `Segments`."""
        return Segments(self.tokens, batch, length, rank, world, self.starts)

    def shuffled(self, batch: int, length: int, *, seed: int = 0, rank: int = 0, world: int = 1) -> ShuffledSegments:
        """Cut for training where each segment stands alone: see `ShuffledSegments`."""
        return ShuffledSegments(self.tokens, batch, length, seed, rank, world, self.starts)

    def windows(self, length: int, stride: int = 1, *, batch: int = 1) -> Windows:
        """Cut for evaluation by sliding window: see `Windows`."""
        return Windows(self.tokens, length, stride, batch, self.starts)


@dataclass(frozen=True)
class Corpus:
    """What `fastweights data` wrote: three streams and the tokenizer they are written with."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: TokenStream
    valid: TokenStream
    test: TokenStream

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = False) -> Self:
        """Map a finished corpus: its sizes must be those of the manifest, and with `verify` every checksum too."""
        folder = Path(folder)
        manifest = finished(folder, "stream", verify)
        kind, dtype = manifest["vocabulary"]["kind"], _DTYPES[manifest["dtype"]]
        content = (folder / manifest["vocabulary"]["file"]).read_bytes()
        tokenizer = look_up(TOKENIZERS, kind, "tokenizer").load(content)
        if tokenizer.size != manifest["vocabulary"]["size"]:
            raise DataError(f"the vocabulary in {folder} has {tokenizer.size:,} entries; prepare the corpus again")
        streams = {split: _mapped(folder, manifest["splits"][split], dtype) for split in SPLITS}
        return cls(folder, manifest, tokenizer, **streams)

    def split(self, name: str) -> TokenStream:
        """Return the stream of that name: train, valid or test."""
        return look_up({split: getattr(self, split) for split in SPLITS}, name, "split")

    @property
    def fingerprint(self) -> str:
        """A name of these tokens and this vocabulary, wherever they lie, by which a run knows its corpus."""
        return fingerprint(self.manifest)


def _mapped(folder: Path, entry: dict[str, Any], dtype: torch.dtype) -> TokenStream:
    return TokenStream(torch.from_file(str(folder / entry["file"]), shared=False, size=entry["tokens"], dtype=dtype))


def _share(batch: int, length: int, rank: int, world: int) -> slice:
    """Return the rows of a batch that are this rank's."""
    at_least_one(batch=batch, length=length, world=world)
    if not 0 <= rank < world:
        raise ValueError(f"rank must be 0 … world - 1 = {world - 1}, got {rank}")
    if batch % world:
        raise ValueError(f"batch {batch} cannot be shared evenly by {world} ranks; take a multiple of {world}")
    share = batch // world
    return slice(rank * share, (rank + 1) * share)
