"""Checkpoints on disk: complete and verified, or absent.

    FOLDER/step-00001000/weights.safetensors    the model
    FOLDER/step-00001000/training.pt            all else that resuming needs, readable with weights_only=True
    FOLDER/step-00001000/manifest.json          step, sizes and SHA-256 of the files
    FOLDER/best-00000800/                       the weights with the best validation, without training.pt

A checkpoint is written under a temporary name, synced to the disk, and then renamed; one that was cut short has no
valid name. One that was damaged later fails its checksums: training renames it to `NAME.damaged` and resumes from the
one before it, and whoever only reads gets an error and changes nothing. A format of another version and a disk that
cannot be read are no damage, and stop both.
"""

import hashlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from fastweights.common.files import write_durably
from fastweights.common.tables import check_types

FORMAT = 1
WEIGHTS, TRAINING, MANIFEST = "weights.safetensors", "training.pt", "manifest.json"
_NAME = re.compile(r"(step|best)-(\d{8,})")
_DAMAGED = ".damaged"
# A reader that meets a checkpoint while training replaces or removes it looks again.
_ATTEMPTS, _PAUSE_S = 5, 0.1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are missing or have changed since they were written."""


class Checkpoint(NamedTuple):
    """A checkpoint on disk."""

    folder: Path
    step: int
    scores: dict[str, float]


class Contents(NamedTuple):
    """What a checkpoint holds, all tensors on the CPU; `training` is None for the weights alone."""

    weights: dict[str, Tensor]
    training: dict[str, Any] | None


class CheckpointStore:
    """The checkpoints of a run that is being trained. The last `keep` stay, and the best; `warn` is told of damage."""

    def __init__(self, folder: Path, keep: int = 2, warn: Callable[[str], None] = lambda message: None) -> None:
        self.folder = folder
        self.keep = keep
        self.warn = warn

    def save(self, step: int, contents: Contents, scores: dict[str, float] | None = None) -> Path:
        """Write a checkpoint, then remove those that are no longer kept. An OSError leaves everything as it was."""
        kind = "best" if contents.training is None else "step"
        target = self.folder / f"{kind}-{step:08d}"
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        replaced = self.folder / f".{target.name}.replaced.tmp"
        try:
            temporary.mkdir(parents=True)
            data, aliases = _weights_bytes(contents.weights)
            files = {WEIGHTS: _write(temporary / WEIGHTS, data) | ({"aliases": aliases} if aliases else {})}
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
        """Return the last undamaged checkpoint, None when there is none at all; damaged ones are set aside.

        CheckpointError when all are damaged, or when one is of another format or cannot be read.
        """
        candidates = list_checkpoints(self.folder, "step")
        for folder in candidates:
            try:
                return read(folder)
            except DamagedCheckpoint as error:
                self._set_aside(folder, error)
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints step-* in {self.folder} is whole; "
                "they are kept as *.damaged; train anew, or copy a good one back under its old name"
            )
        return None

    def best_scores(self) -> dict[str, float]:
        """Return the scores of the best checkpoint without reading its weights; empty when there is none."""
        for folder in list_checkpoints(self.folder, "best"):
            try:
                return dict(read_manifest(folder)["scores"])
            except DamagedCheckpoint as error:
                self._set_aside(folder, error)
        return {}

    def clear_temporaries(self) -> None:
        """Remove what a killed process left, and restore the name of a checkpoint that was being replaced."""
        for path in self.folder.glob(".*.replaced.tmp"):
            target = self.folder / path.name.removeprefix(".").removesuffix(".replaced.tmp")
            if not target.exists():
                path.replace(target)
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, folder: Path, error: CheckpointError) -> None:
        aside = folder.with_name(folder.name + _DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
        self.warn(f"{error}; it is kept as {aside.name} and the one before it is used")

    def _prune(self, kind: str, newest: Path) -> None:
        present = list_checkpoints(self.folder, kind)
        for folder in present[self.keep :] if kind == "step" else [other for other in present if other != newest]:
            # Renamed first: half a folder must not keep a valid name.
            doomed = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            folder.replace(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def list_checkpoints(folder: Path, kind: str) -> list[Path]:
    """Return the folders of the checkpoints of a kind, "step" or "best", the last first."""
    matches = [match for path in folder.glob(f"{kind}-*") if (match := _NAME.fullmatch(path.name))]
    return [folder / match[0] for match in sorted(matches, key=lambda match: int(match[2]), reverse=True)]


def read(folder: Path) -> tuple[Checkpoint, Contents]:
    """Read a checkpoint; DamagedCheckpoint when its files are not those of its manifest, or another CheckpointError."""
    manifest = read_manifest(folder)
    content = {name: _read(folder / name, entry) for name, entry in manifest["files"].items()}
    try:
        weights = load_safetensors(content[WEIGHTS])
        for alias, name in manifest["files"][WEIGHTS].get("aliases", {}).items():
            weights[alias] = weights[name]
        stored = content.get(TRAINING)
        training = None if stored is None else torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except Exception as error:
        # The checksums are right, so this is no damage.
        raise CheckpointError(f"checkpoint {folder} cannot be read ({type(error).__name__}: {error})") from error
    return Checkpoint(folder, manifest["step"], manifest["scores"]), Contents(weights, training)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest whose entries are present and of the right types, with the errors of `read`."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        check_types(manifest, {"format": int})
        if (version := manifest["format"]) != FORMAT:
            raise CheckpointError(f"checkpoint {folder} has format {version}, this version reads format {FORMAT}")
        check_types(manifest, {"step": int, "files": dict, "scores": dict})
        files, scores = manifest["files"], manifest["scores"]
        aliases = files[WEIGHTS].get("aliases", {})
        check_types(aliases, dict.fromkeys(aliases, str))
        for entry in files.values():
            check_types(entry, {"bytes": int, "sha256": str})
        if not files.keys() <= {WEIGHTS, TRAINING} or not all(isinstance(x, (int, float)) for x in scores.values()):
            raise TypeError(f"files are {list(files)}, scores {scores}")
    except OSError as error:
        _raise_unreadable(path, error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder} has no valid {MANIFEST} ({error!r})") from None
    return manifest


def load_weights(model: nn.Module, run: Path | str, which: str = "best") -> Checkpoint:
    """Give `model` the weights of a run: "best" by validation, or "last", which is all there is without validation.

    Changes nothing in the folder, which may be in training at the same time.
    """
    if which not in ("best", "last"):
        raise ValueError(f"which must be 'best' or 'last', got {which!r}")
    folder = Path(run) / "checkpoints"
    for attempt in range(_ATTEMPTS):
        try:
            checkpoint, contents = read_chosen(folder, which)
            break
        except CheckpointError:
            if attempt == _ATTEMPTS - 1 or not folder.is_dir():
                raise
            time.sleep(_PAUSE_S)
    model.load_state_dict(contents.weights)
    return checkpoint


def read_chosen(folder: Path, which: str) -> tuple[Checkpoint, Contents]:
    """Read the best or the last checkpoint, or say why not: another one in its place would be another model."""
    damaged = sorted(path.name for path in folder.glob(f"best-*{_DAMAGED}"))
    best = list_checkpoints(folder, "best") if which == "best" else []
    if which == "best" and damaged and not best:
        raise CheckpointError(
            f"the best checkpoint of {folder.parent} was damaged and is kept as {damaged[-1]}; take the last one, or "
            "copy a good one back under its old name"
        )
    candidates = best or list_checkpoints(folder, "step")
    if not candidates:
        raise CheckpointError(f"{folder.parent} holds no checkpoint yet")
    try:
        return read(candidates[0])
    except DamagedCheckpoint as error:
        other = "the last one" if best else "the one before it, which training does too"
        raise DamagedCheckpoint(f"{error}; move it away to use {other}, or copy a good one back in its place") from None


def _weights_bytes(weights: dict[str, Tensor]) -> tuple[bytes, dict[str, str]]:
    """Serialise each shared tensor once; also return the other names of those."""
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


def _write(path: Path, data: bytes | memoryview) -> dict[str, Any]:
    """Write a file and return its entry in the manifest."""
    write_durably(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _read(path: Path, entry: dict[str, Any]) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        _raise_unreadable(path, error)
    if len(data) != entry["bytes"]:
        raise DamagedCheckpoint(f"{path} has {len(data)} bytes where its manifest says {entry['bytes']}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise DamagedCheckpoint(f"{path} does not have the checksum in its manifest")
    return data


def _raise_unreadable(path: Path, error: OSError) -> NoReturn:
    """Raise for a missing file of a checkpoint, which is damage, or for one that cannot be read now."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise DamagedCheckpoint(f"checkpoint {path.parent} lacks {path.name} ({error.strerror})") from None
    raise CheckpointError(f"{path} cannot be read ({error.strerror}); nothing was changed") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
