"""Lightning Fabric for device, precision and processes, and what the processes say to each other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastweights.training.engine.config import TrainingConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")


class Objective(nn.Module):
    """Runs a function of the model inside the forward pass that wrappers expect, and returns its first tensor.

    Fabric, DDP and FSDP hang their work of the backward pass on that tensor. They copy and cast all tensors that they
    find in arguments and results; a carried float32 memory must not come out as bfloat16. So the function brings its
    arguments, and keeps the rest of its result.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Tensor | None]) -> Tensor | None:
        return function(self.model)


def launch(config: TrainingConfig) -> Fabric:
    """Start all processes of the configuration and return their Fabric."""
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies.ddp import DDPStrategy
        from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
    except ImportError as error:
        raise ImportError(
            f"training needs Lightning Fabric ({error}); install it with: pip install 'fastweights[train]'"
        ) from None

    # Its notes on the set-up repeat the configuration, in every process.
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    devices, nodes = _processes(config)
    world = devices * nodes
    name = config.strategy if config.strategy != "auto" else ("ddp" if world > 1 else "single")
    if name == "single" and world > 1:
        raise ValueError(f"strategy 'single' is for one process, not {world}; use 'ddp', 'fsdp' or 'auto'")

    class DataParallel(DDPStrategy):
        def setup_module(self, module: nn.Module) -> DistributedDataParallel:
            # Lightning does this in a stream of its own, and each backward pass would wait for two.
            devices = None if self.root_device.type == "cpu" else [self.root_device.index]
            return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)

    strategy: Any = "auto"
    if name == "ddp":
        strategy = DataParallel()
    elif name == "fsdp":
        strategy = ModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1)
    precision: Any = config.precision
    fabric = Fabric(
        accelerator=config.accelerator, devices=devices, num_nodes=nodes, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def _processes(config: TrainingConfig) -> tuple[int, int]:
    """Return the processes on a node, and nodes: what torchrun says where it has started this process."""
    if "LOCAL_WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if config.devices not in ("auto", here):
            raise ValueError(f"devices={config.devices!r}, but torchrun has started {here} processes on this machine")
        return here, int(os.environ["WORLD_SIZE"]) // here
    if config.devices == "auto":
        return 1, config.nodes
    return int(config.devices), config.nodes


def _shard(objective: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let FSDP gather one at a time what the model's `ModuleList`s hold."""
    from torch.distributed.fsdp import fully_shard

    data_parallel = mesh["data_parallel"]
    parts = [part for module in objective.modules() if isinstance(module, nn.ModuleList) for part in module]
    for part in parts:
        fully_shard(part, mesh=data_parallel)
    fully_shard(objective, mesh=data_parallel)
    return objective


def on_first_process(fabric: Fabric, function: Callable[[], Value]) -> Value:
    """Return, or raise, in all processes what `function` returns or raises in the first."""
    outcome: tuple[Value | None, Exception | None] = (None, None)
    if fabric.is_global_zero:
        try:
            outcome = (function(), None)
        except Exception as error:
            if fabric.world_size == 1:
                raise
            outcome = (None, error)
    value, failure = fabric.broadcast(outcome) if fabric.world_size > 1 else outcome
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def gather(fabric: Fabric, value: Value) -> list[Value]:
    """Return the value of each process, in the first process; an empty list in the others."""
    if fabric.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * fabric.world_size if fabric.is_global_zero else None
    torch.distributed.gather_object(value, values)
    return values or []


def maximum_over_processes(fabric: Fabric, values: list[int]) -> list[int]:
    """Return the greatest of each number over all processes, in all of them."""
    if fabric.world_size == 1:
        return values
    greatest: Any = fabric.all_reduce(torch.tensor(values, device=fabric.device), reduce_op="max")
    return greatest.tolist()
