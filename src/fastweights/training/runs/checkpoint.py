"""Checkpoints on disk: whole and proven, or not there.

    FOLDER/step-00001000/weights.safetensors    the model
    FOLDER/step-00001000/training.pt            all else that going on needs, readable with weights_only=True
    FOLDER/step-00001000/manifest.json          step, sizes and SHA-256 of the files
    FOLDER/best-00000800/                       the weights with the best validation, without training.pt

A checkpoint is written under a temporary name, brought to the disk, and then renamed; one that was cut short has no
valid name. What was damaged later fails its checksums, is set aside as `NAME.damaged`, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

FORMAT = 1
WEIGHTS, TRAINING, MANIFEST = "weights.safetensors", "training.pt", "manifest.json"
_NAME = re.compile(r"(step|best)-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written."""


class Checkpoint(NamedTuple):
    """One on disk."""

    folder: Path
    step: int
    scores: dict[str, float]


class Contents(NamedTuple):
    """One in memory, all tensors on the CPU; `training` is None for the weights alone."""

    weights: dict[str, Tensor]
    training: dict[str, Any] | None


class CheckpointStore:
    """The checkpoints of a run. `keep` of them stay, and the best; `warn` is told of damage."""

    def __init__(self, folder: Path, keep: int = 2, warn: Callable[[str], None] = lambda message: None) -> None:
        self.folder = folder
        self.keep = keep
        self.warn = warn

    def save(self, step: int, contents: Contents, scores: dict[str, float] | None = None) -> Path:
        """Write one, then remove those that are no longer kept. An OSError leaves everything as it was."""
        kind = "best" if contents.training is None else "step"
        target = self.folder / f"{kind}-{step:08d}"
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        replaced = self.folder / f".{target.name}.replaced.tmp"
        try:
            temporary.mkdir(parents=True)
            files = {WEIGHTS: _write(temporary / WEIGHTS, _weights_bytes(contents.weights))}
            if contents.training is not None:
                buffer = io.BytesIO()
                torch.save(contents.training, buffer)
                files[TRAINING] = _write(temporary / TRAINING, buffer.getbuffer())
            manifest = {"format": FORMAT, "step": step, "scores": scores or {}, "files": files}
            _write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
            _sync_folder(temporary)
            if target.exists():
                target.replace(replaced)
            temporary.replace(target)
            _sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune(kind, target)
        return target

    def newest(self) -> tuple[Checkpoint, Contents] | None:
        """The last one that is whole; None when there is none at all.

        Those that fail their checksums are reported and set aside. CheckpointError when no whole one is left.
        """
        return self._first_whole("step", sorted(self._list("step"), reverse=True))

    def best(self) -> tuple[Checkpoint, Contents] | None:
        """The whole one with the best validation; None when there is none."""
        return self._first_whole("best", sorted(self._list("best"), reverse=True))

    def best_scores(self) -> dict[str, float]:
        """Scores of the best one, without reading its weights; empty when there is none."""
        for _, folder in sorted(self._list("best"), reverse=True):
            try:
                return dict(read_manifest(folder)["scores"])
            except CheckpointError as error:
                self._set_aside(folder, error)
        return {}

    def clear_temporaries(self) -> None:
        """Remove what a killed process left, and give back its name to one that was being replaced."""
        for path in self.folder.glob(".*.replaced.tmp"):
            target = self.folder / path.name.removeprefix(".").removesuffix(".replaced.tmp")
            if not target.exists():
                path.replace(target)
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _list(self, kind: str) -> list[tuple[int, Path]]:
        matches = ((_NAME.fullmatch(path.name), path) for path in self.folder.glob(f"{kind}-*"))
        return [(int(match[2]), path) for match, path in matches if match]

    def _first_whole(self, kind: str, candidates: list[tuple[int, Path]]) -> tuple[Checkpoint, Contents] | None:
        for _, folder in candidates:
            try:
                return read(folder)
            except CheckpointError as error:
                self._set_aside(folder, error)
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints {kind}-* in {self.folder} is whole; "
                "they are kept as *.damaged; train anew, or copy a good one back under its old name"
            )
        return None

    def _set_aside(self, folder: Path, error: CheckpointError) -> None:
        aside = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
        self.warn(f"{error}; it is kept as {aside.name} and the one before it is used")

    def _prune(self, kind: str, newest: Path) -> None:
        ordered = [folder for _, folder in sorted(self._list(kind), reverse=True)]
        for folder in ordered[self.keep :] if kind == "step" else [other for other in ordered if other != newest]:
            # Renamed first: half a folder must not keep a valid name.
            doomed = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            folder.replace(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def read(folder: Path) -> tuple[Checkpoint, Contents]:
    """A checkpoint with its contents; CheckpointError with the file and the reason when anything is amiss."""
    manifest = read_manifest(folder)
    found = {name: _read(folder / name, entry) for name, entry in manifest["files"].items()}
    try:
        weights = load_safetensors(found[WEIGHTS])
        for alias, name in manifest["files"][WEIGHTS].get("aliases", {}).items():
            weights[alias] = weights[name]
        stored = found.get(TRAINING)
        training = None if stored is None else torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read ({type(error).__name__}: {error})") from error
    return Checkpoint(folder, manifest["step"], manifest["scores"]), Contents(weights, training)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, with the entries it must have."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found = manifest["format"]
        complete = found != FORMAT or (WEIGHTS in manifest["files"] and "step" in manifest and "scores" in manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder} has no valid {MANIFEST} ({error})") from None
    if found != FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {found!r}, this version reads format {FORMAT}")
    if not complete:
        raise CheckpointError(f"checkpoint {folder} has an incomplete {MANIFEST}")
    return manifest


def load_weights(model: nn.Module, run: Path | str, which: str = "best") -> Checkpoint:
    """Give `model` the weights of a run: "best" by validation, or "last", which is all there is without validation."""
    if which not in ("best", "last"):
        raise ValueError(f"which must be 'best' or 'last', got {which!r}")
    store = CheckpointStore(Path(run) / "checkpoints")
    found = (store.best() if which == "best" else None) or store.newest()
    if found is None:
        raise CheckpointError(f"{run} holds no checkpoint yet")
    checkpoint, contents = found
    model.load_state_dict(contents.weights)
    return checkpoint


def _weights_bytes(weights: dict[str, Tensor]) -> tuple[bytes, dict[str, str]]:
    """Serialised, each shared tensor once, with the further names of those."""
    seen: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    alone: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else (name,)
        if place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        alone[name] = tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
    return save_safetensors(alone), aliases


def _write(path: Path, content: Any) -> dict[str, Any]:
    """`content`, bytes or (bytes, aliases), on the disk for good; its entry in the manifest."""
    data, aliases = content if isinstance(content, tuple) else (content, {})
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return entry | ({"aliases": aliases} if aliases else {})


def _read(path: Path, entry: dict[str, Any]) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.parent} lacks {path.name} ({error.strerror})") from None
    if len(data) != entry["bytes"]:
        raise CheckpointError(f"{path} has {len(data)} bytes where its manifest says {entry['bytes']}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{path} does not have the checksum in its manifest")
    return data


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
