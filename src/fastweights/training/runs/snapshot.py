"""What a checkpoint holds, taken from and given back to living objects: weights, optimiser, generators."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastweights.common.sharding import is_sharded

Named = Mapping[str, Tensor]


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (str(kind), keys.tolist(), int(position), int(has_gauss), float(gauss)),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Put the global generators where `generators` found them; that of a GPU only on a GPU."""
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict as whole tensors on the CPU, tied weights in shared memory; all processes call it."""
    moved: dict[int, Tensor] = {}

    def whole(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = _whole(tensor)
        return moved[id(tensor)]

    # keep_vars leaves tied weights one object each, by which they are known.
    return {name: whole(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def load_weights_into(model: nn.Module, weights: Named) -> None:
    """Give the model, sharded or not, what `weights_of` returned."""
    own = model.state_dict(keep_vars=True)
    missing, extra = own.keys() - weights.keys(), weights.keys() - own.keys()
    if missing or extra:
        raise ValueError(
            f"the checkpoint is of another model: it lacks {sorted(missing)} and has {sorted(extra)} beside"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != weights[name].shape:
                raise ValueError(f"{name} is {tuple(weights[name].shape)} in the checkpoint, not {tuple(tensor.shape)}")
            tensor.copy_(_like(weights[name], tensor))


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return what the optimiser remembers of each parameter by name, whole and on the CPU; all processes call it."""
    return {
        name: {key: _whole(value) if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if p in optimizer.state
    }


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the optimiser what `optimizer_state` returned; rates and other settings stay those it was made with."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for index, parameter in enumerate(parameters):
        if names[parameter] in saved:
            state[index] = {
                key: _like(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
                for key, value in saved[names[parameter]].items()
            }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if is_sharded(tensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True)


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    """Distribute a tensor over the processes as `model` is."""
    if is_sharded(model):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)
    return tensor
