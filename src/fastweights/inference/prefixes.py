"""Prefixes that several texts share, read once: snapshots of streams by the tokens that they have read.

store = PrefixStore(model, folder="prefixes")
stream = store.open(system_prompt + first_question)     # reads all of it
stream = store.open(system_prompt + second_question)    # reads on from where the two part, or shortly before
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from fastweights.common.files import remove_stale_temporaries
from fastweights.inference.snapshot import Snapshot, load_snapshots, save_snapshots
from fastweights.inference.stream import Stream
from fastweights.models.language_model import LanguageModel

_SUFFIX = ".prefix.safetensors"


class PrefixStore:
    """States of one model by the tokens that led to them, of which the least recently used are dropped.

    Several processes may use one folder at a time: files appear whole, under names that are digests of the weights and
    the tokens, and a file that another process has dropped is just not found.

    Args:
        model: the model, whose weights must not change as long as the store is used.
        folder: keep states there as well, for other processes and later ones; None for memory only.
        every: tokens between two states that are kept of a text; one more is kept at its end. Two texts share what they
            have in common up to a multiple of this.
        memory_bytes: the most bytes of states in memory.
        disk_bytes: the most bytes of files in the folder.
        **options: those of `Stream` for the streams that `open` returns, such as `state_format="bf16"`.
    """

    def __init__(
        self,
        model: LanguageModel,
        folder: Path | str | None = None,
        *,
        every: int = 64,
        memory_bytes: int = 256 * 2**20,
        disk_bytes: int = 2**30,
        **options: Any,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 token, got {every}")
        self.model, self.every = model, every
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.folder = None if folder is None else Path(folder)
        self._options = options
        self._seed = _fingerprint(model, options)
        self._held: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._lock = Lock()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_stale_temporaries(self.folder)

    def open(self, tokens: Sequence[int]) -> Stream:
        """Return a stream that has read `tokens`: the longest prefix from the store, and the rest from the model."""
        tokens = [int(token) for token in tokens]
        if not tokens:
            raise ValueError("tokens are empty, so there is no prefix to open; give at least one")
        keys = self._keys(tokens)
        start, snapshot = self._longest(keys)
        stream = Stream(self.model, snapshot, **self._options)
        for end in sorted(end for end in keys if end > start):
            stream.feed(tokens[start:end])
            self._keep(keys[end], stream.snapshot())
            start = end
        return stream

    def longest(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens need not be read again."""
        return self._longest(self._keys([int(token) for token in tokens]))[0]

    @property
    def nbytes(self) -> int:
        """Bytes of states in memory."""
        with self._lock:
            return sum(snapshot.nbytes for snapshot in self._held.values())

    def _keys(self, tokens: list[int]) -> dict[int, bytes]:
        """Return the digest of everything up to each position at which states are kept."""
        digest, keys = hashlib.blake2b(self._seed, digest_size=20), {}
        for position, token in enumerate(tokens, 1):
            digest.update(token.to_bytes(8, "little", signed=True))
            if position % self.every == 0 or position == len(tokens):
                keys[position] = digest.digest()
        return keys

    def _longest(self, keys: dict[int, bytes]) -> tuple[int, Snapshot | None]:
        for position in sorted(keys, reverse=True):
            snapshot = self._find(keys[position])
            if snapshot is not None:
                return position, snapshot
        return 0, None

    def _find(self, key: bytes) -> Snapshot | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            (snapshot,) = load_snapshots(path, self.model).values()
            # The time of the last use decides which files are dropped.
            path.touch()
        except (OSError, ValueError):
            # Dropped by another process, or not whole for a reason of the disk's.
            return None
        self._hold(key, snapshot)
        return snapshot

    def _keep(self, key: bytes, snapshot: Snapshot) -> None:
        self._hold(key, snapshot)
        path = self._path(key)
        if path is not None and not path.exists():
            save_snapshots(path, self.model, {"prefix": snapshot})
            self._shrink_folder(path)

    def _hold(self, key: bytes, snapshot: Snapshot) -> None:
        with self._lock:
            self._held[key] = snapshot
            self._held.move_to_end(key)
            total = sum(held.nbytes for held in self._held.values())
            while total > self.memory_bytes and self._held:
                total -= self._held.popitem(last=False)[1].nbytes

    def _shrink_folder(self, newest: Path) -> None:
        """Drop the files that were not used for the longest time, until the rest is small enough."""
        files = []
        for path in newest.parent.glob(f"*{_SUFFIX}"):
            with suppress(OSError):
                status = path.stat()
                files.append((path == newest, status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, _, size, _ in files)
        for _, _, size, path in sorted(files):
            if total <= self.disk_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, key: bytes) -> Path | None:
        return None if self.folder is None else self.folder / f"{key.hex()}{_SUFFIX}"


def _fingerprint(model: LanguageModel, options: dict[str, Any]) -> bytes:
    """Return a digest of a model's configuration and weights, and of what its streams round."""
    digest = hashlib.blake2b(repr((sorted(model.config.to_dict().items()), sorted(options.items()))).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
