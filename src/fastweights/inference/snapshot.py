"""What a stream has of its past, as a thing: held, compared by size, written to files and read from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.common.files import write_atomically
from fastweights.inference.compression import CompressedLayer, CompressedState, Compression, Packed
from fastweights.layers.mixers import MIXERS
from fastweights.models.language_model import LanguageModel, LanguageModelState
from fastweights.ops.state import State

_FORMAT = "2"
# One stream a file, whose name is not written.
_FIRST_FORMAT = "1"


@dataclass(frozen=True)
class Snapshot:
    """A stream at one moment: the model's state, and the last hidden vector, from which the next word is predicted.

    Nothing writes into the tensors of a snapshot, so streams share them.
    """

    state: LanguageModelState | CompressedState | None = None
    hidden: Tensor | None = None

    @property
    def position(self) -> int:
        """Tokens read."""
        return 0 if self.state is None else int(self.state.position)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.state is None else self.state.nbytes

    def full_state(self, dtype: torch.dtype) -> LanguageModelState | None:
        """Return the state that the model continues from, with fast weights in `dtype` where they are compressed."""
        return self.state.restore(dtype) if isinstance(self.state, CompressedState) else self.state


def save_snapshots(path: Path | str, model: LanguageModel, snapshots: Mapping[str, Snapshot]) -> None:
    """Write snapshots by name to a safetensors file, which `load_snapshots` reads for the same model."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    compressions: dict[str, Any] = {}
    for name, snapshot in snapshots.items():
        state = snapshot.state
        if state is None or snapshot.hidden is None:
            raise ValueError(f"nothing has been fed to stream {name!r} yet, so there is nothing to save")
        tensors |= {f"{name}/position": state.position, f"{name}/hidden": snapshot.hidden}
        layers: Sequence[State | CompressedLayer] = state.layers
        for i, layer in enumerate(layers):
            tensors |= {f"{name}/{i}.{field}": x for field, x in layer.tensors().items()}
        compressions[name] = asdict(state.compression) if isinstance(state, CompressedState) else None
    metadata = {
        "stream": _FORMAT,
        "model": json.dumps(model.config.to_dict()),
        "compressions": json.dumps(compressions),
    }
    # Copies: snapshots may share tensors, which a file may not.
    copies = {name: x.detach().cpu().clone().contiguous() for name, x in tensors.items()}
    write_atomically(Path(path), save(copies, metadata))


def load_snapshots(path: Path | str, model: LanguageModel) -> dict[str, Snapshot]:
    """Read what `save_snapshots` wrote for a model of the same configuration; its weights are not compared."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt", device=str(model.softmax.weight.device)) as file:
            metadata = file.metadata() or {}
            # Copies: in the file they begin anywhere, and some kernels round by where their numbers begin.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from None
    except RuntimeError:
        # PyTorch opens the file once more, and it may be gone by then.
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no file {path}") from None
        raise
    if metadata.get("stream") not in (_FORMAT, _FIRST_FORMAT):
        raise ValueError(f"{path} holds {sorted(tensors)[:6]} …, not what Stream.save writes")
    _check_model(path, json.loads(metadata["model"]), json.loads(json.dumps(model.config.to_dict())))
    if metadata["stream"] == _FIRST_FORMAT:
        tensors = {f"stream/{name}": x for name, x in tensors.items()}
    compressions = json.loads(metadata.get("compressions", '{"stream": null}'))
    named: dict[str, dict[str, Tensor]] = {name: {} for name in compressions}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        named[name][entry] = tensor
    return {name: _snapshot(model, named[name], compression) for name, compression in compressions.items()}


def _snapshot(model: LanguageModel, tensors: dict[str, Tensor], compression: dict[str, Any] | None) -> Snapshot:
    position, hidden = tensors.pop("position"), tensors.pop("hidden")
    layers: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    for name, tensor in tensors.items():
        number, _, entry = name.partition(".")
        layers[int(number)][entry] = tensor
    if compression is None:
        kind = MIXERS[model.config.mixer].state
        return Snapshot(LanguageModelState([kind(**layer) for layer in layers], position), hidden)
    packed = [CompressedLayer(Packed.from_tensors("W", layer), **layer) for layer in layers]
    return Snapshot(CompressedState(packed, position, Compression(**compression)), hidden)


def _check_model(path: Path | str, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [
        f"{name}: {before.get(name)!r} there, {now[name]!r} here" for name in now if before.get(name) != now[name]
    ]
    if differing:
        raise ValueError(f"{path} was saved from another model ({'; '.join(differing)})")
