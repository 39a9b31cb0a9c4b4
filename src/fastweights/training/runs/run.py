"""The folder of a run, read back: what every kind of model does alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn

from fastweights.common.files import write_atomically
from fastweights.training.runs.checkpoint import Checkpoint, CheckpointError, load_weights
from fastweights.training.runs.folder import RunError

Model = TypeVar("Model", bound=nn.Module)


class _Config(Protocol):
    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self: ...


Config = TypeVar("Config", bound=_Config)


def read_run(folder: Path, name: str, what: str, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the run in `folder` says of its task and of where it was made; RunError if it is of another task."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
        task = found["task"]
        given = task["name"]
    except OSError:
        missing = "holds no run" if folder.is_dir() else "does not exist"
        raise RunError(f"{folder} {missing}; `fastweights {command} --out {folder}` trains one there") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is not the configuration of a run ({error!r})") from None
    if given != name:
        raise RunError(f"{folder} holds a run of the task {given!r}, not of {what}")
    if "model" not in task:
        raise RunError(f"{path} cannot be used by this version: it names no model")
    return task, found.get("about", {})


def configured(kind: type[Config], folder: Path, values: Mapping[str, Any]) -> Config:
    """The model's configuration; RunError where this version does not understand it."""
    try:
        return kind.from_dict(values)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / 'config.json'} cannot be used by this version: {error}") from None


def load_model(model: Model, folder: Path, which: str, device: str | torch.device) -> tuple[Model, Checkpoint]:
    """The model with the weights of a run, in evaluation mode, and the checkpoint that they are from."""
    try:
        checkpoint = load_weights(model, folder, which)
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the weights in {folder} are not those of its config.json: {error}") from None
    return model.to(device).eval(), checkpoint


def keep_beside(folder: Path, name: str, content: bytes, fresh: bool = False) -> None:
    """Write a file that the run needs beside it.

    One that is there already belongs to the run that is there, unless that one is about to be moved away.
    """
    try:
        if fresh or not (folder / name).exists():
            write_atomically(folder / name, content)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None
