"""Model, optimiser and carried state, and one update of them."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastweights.common.allocator import keep_freed_memory
from fastweights.common.tree import map_tensors, pack, to_device, unpack
from fastweights.training.engine.capture import CapturedUpdates, refusal
from fastweights.training.engine.config import GRAPHING_MODES, TrainingConfig
from fastweights.training.engine.distributed import Objective, gather
from fastweights.training.engine.optim import (
    global_norm,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    step_scaled,
)
from fastweights.training.engine.task import LossOutcome, Task
from fastweights.training.runs import snapshot
from fastweights.training.runs.checkpoint import Contents

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Learner:
    """All that training changes. `advance` makes one update and leaves its numbers on the device; `read` fetches them.

    Attributes:
        step: updates made.
        model: the bare model, for looking at; `call` runs functions of it.
    """

    def __init__(self, fabric: Fabric, task: Task, config: TrainingConfig) -> None:
        self.fabric, self.task, self.config = fabric, task, config
        self.device, self.rank, self.world = fabric.device, fabric.global_rank, fabric.world_size
        if self.device.type == "cpu":
            keep_freed_memory()
        self.step = 0
        self.carry: Any = None
        self._carry_before: Any = None
        snapshot.seed_everything(config.seed)
        self.model: nn.Module = task.build()
        self._module = fabric.setup_module(Objective(self.model.to(self.device)))
        self._optimizer = task.optimizer(self.model, config) or make_optimizer(
            self.model, config, task.regions(self.model)
        )
        self._wrapped_optimizer: Any = fabric.setup_optimizers(self._optimizer)
        self._parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if config.graph and (reason := refusal(self.device, self.world, self._optimizer.param_groups)):
            raise ValueError(f"graph: {reason}; train without it")
        self._captured = self._captured_updates() if config.graph else None
        self._loss = self._compiled()
        # Graph replays write their results to the same place each time.
        self._loss_is_graph = config.compile in GRAPHING_MODES and self.device.type == "cuda"
        self._meter: dict[str, Tensor] = {}
        self._broken = torch.zeros((), device=self.device, dtype=torch.float32)
        self._one = torch.ones((), device=self.device)
        task.place(self.device)
        snapshot.seed_everything(config.seed + 1 + self.rank)
        self.model.train()

    def _captured_updates(self) -> CapturedUpdates:
        return CapturedUpdates(self._make_update, self.device, self.task.many_shapes)

    def _compiled(self) -> Any:
        """Return the loss, compiled where that is wanted: the task's regions one for all, or all of it."""
        mode = self.config.compile
        if mode is None:
            return self.task.loss
        # None: for the first sizes alone, and for all once there are others.
        dynamic = True if self.task.many_shapes else None
        regions = self.task.regions(self.model)
        if not regions or mode in GRAPHING_MODES:
            return torch.compile(self.task.loss, mode=mode, dynamic=dynamic)
        # The compiler looks for gradients on whatever comes into a region, and is told that it will find none.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor", UserWarning)
        for region in regions:
            region.compile(mode=mode, dynamic=dynamic)
        return self.task.loss

    def call(self, function: Any, *arguments: Any, compiled: bool = False) -> Any:
        """Call `function(model, *arguments)` inside the wrappers' forward pass, at the precision of training.

        Compiled code runs only on request: validation has other shapes, and each of them would be compiled.
        """
        result: Any = None

        def run(model: nn.Module) -> Tensor | None:
            nonlocal result
            result = function(model, *arguments)
            first = result[0] if isinstance(result, tuple) else None
            return first if isinstance(first, Tensor) else None

        eager = not compiled and self.config.compile is not None
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            self._module(run)
        return result

    def advance(self) -> None:
        """Make one update, without waiting for the device."""
        set_learning_rate(self._optimizer, learning_rate(self.config, self.step))
        batches = [self._batch(self.step, part) for part in range(self.config.accumulate)]
        if self._captured is not None:
            self._carry_before, self.carry = self._captured(batches, self.carry)
        else:
            self._carry_before, self.carry = self.carry, self._make_update(batches, self.carry)
        self.step += 1

    def _make_update(self, batches: list[Any], carry: Any, compiled: bool = True) -> Any:
        """Do everything of an update that happens on the device; return what is carried on."""
        self._wrapped_optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        for part, batch in enumerate(batches):
            with self._synchronised(part == len(batches) - 1):
                outcome, tokens, carry = self._forward(batch, carry, compiled)
                self.fabric.backward(outcome.loss * tokens if self._weighted else outcome.loss)
            if self._loss_is_graph and part == 0 and len(batches) > 1:
                self._own_gradients()
            for name, value in {"loss": outcome.loss, **outcome.metrics}.items():
                scalar = tokens if name == "tokens" else self._scalar(value).detach() * tokens
                totals[name] = totals[name] + scalar if name in totals else scalar
            totals.setdefault("tokens", tokens)
        values = torch.stack([value.double() for value in totals.values()])
        if self.world > 1:
            torch.distributed.all_reduce(values)
        self._update(dict(zip(totals, values, strict=True)))
        return carry

    @property
    def _weighted(self) -> bool:
        """Whether batches of unequal size meet in one update, so that a mean of their means would be wrong."""
        return self.world * self.config.accumulate > 1

    def _update(self, sums: dict[str, Tensor]) -> None:
        factor = self._one
        if self._weighted:
            # Each process holds the mean over processes of gradients of sums over tokens.
            factor = (self.world / sums["tokens"]).float()
        norm = global_norm(self._parameters, self.device).float() * factor
        finite = torch.isfinite(sums["loss"]) & torch.isfinite(norm)
        # Counts the updates since the first that went wrong, itself included; from there on the weights stand still.
        self._broken += ((self._broken > 0) | ~finite).float()
        if self.config.clip is not None:
            factor = factor * (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        step_scaled(self._optimizer, self._wrapped_optimizer.step, factor, (self._broken > 0).float())
        for name, value in {**sums, "grad_norm": norm.double(), "steps": self._one.double()}.items():
            # In place: a captured update knows its meters by their address.
            self._meter.setdefault(name, torch.zeros_like(value)).add_(value)

    def _own_gradients(self) -> None:
        """Take the gradients out of the memory that the next replay writes to, so that it adds to them."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _batch(self, step: int, part: int) -> Any:
        return to_device(self.task.batch(step * self.config.accumulate + part, self.rank, self.world), self.device)

    def _forward(self, batch: Any, carry: Any, compiled: bool) -> tuple[LossOutcome, Tensor, Any]:
        """Return the outcome, its number of tokens, and what it carries on, cut off from it."""
        if self._loss_is_graph:
            torch.compiler.cudagraph_mark_step_begin()
        outcome = LossOutcome(*self.call(self._loss, batch, carry, compiled=compiled))
        keep = (lambda tensor: tensor.detach().clone()) if self._loss_is_graph else Tensor.detach
        tokens = keep(self._scalar(outcome.metrics.get("tokens", 1))).float()
        return outcome, tokens, map_tensors(keep, outcome.carry)

    def _scalar(self, value: Tensor | float) -> Tensor:
        # full() fills on the device; tensor() would copy from the host and wait.
        return value if isinstance(value, Tensor) else torch.full((), float(value), device=self.device)

    def _synchronised(self, last: bool) -> AbstractContextManager[Any]:
        if self.world == 1 or self.config.accumulate == 1:
            return nullcontext()
        return self.fabric.no_backward_sync(self._module, enabled=not last)

    def read(self) -> dict[str, float]:
        """Return means by token since the last call; "tokens" and "steps" are sums. Waits for the device."""
        values = dict(zip(self._meter, torch.stack(list(self._meter.values())).tolist(), strict=True))
        for value in self._meter.values():
            value.zero_()
        tokens, steps = values.pop("tokens"), values.pop("steps")
        norm = values.pop("grad_norm") / steps
        means = {name: value / tokens for name, value in values.items()}
        return {**means, "grad_norm": norm, "tokens": tokens, "steps": steps}

    def unread_tokens(self) -> float:
        """Return the tokens since the last `read`. Waits for the device."""
        return float(self._meter["tokens"]) if self._meter else 0.0

    def broken_at(self) -> int | None:
        """Return the first update, counted from 1, whose loss or gradient was not finite. Waits for the device."""
        count = int(self._broken.item())
        return self.step - count + 1 if count else None

    def repeat(self, step: int) -> Tensor:
        """Compute loss and gradients of update `step`, counted from 1, once more, with weights as they are."""
        self._wrapped_optimizer.zero_grad(set_to_none=True)
        self.carry = self._carry_before
        total = self._one * 0
        for part in range(self.config.accumulate):
            outcome = LossOutcome(*self.call(self.task.loss, self._batch(step - 1, part), self.carry))
            self.carry = map_tensors(Tensor.detach, outcome.carry)
            self.fabric.backward(outcome.loss)
            total = total + outcome.loss.detach() / self.config.accumulate
        return total

    def validate(self) -> dict[str, float]:
        """Run the task's validation, which leaves no trace in training."""
        states = snapshot.generators(self.device)
        self.model.eval()
        try:
            with torch.no_grad():
                return {name: float(value) for name, value in self.call(self.task.validate).items()}
        finally:
            self.model.train()
            snapshot.restore_generators(states, self.device)

    def contents(self) -> Contents:
        """Return everything, on the CPU, for a checkpoint of the first process; all processes have to call it."""
        own = {"generators": snapshot.generators(self.device), "carry": pack(self.carry)}
        training = {
            "step": self.step,
            "optimizer": snapshot.optimizer_state(self.model, self._optimizer),
            "meter": pack(self._meter),
            "processes": gather(self.fabric, own),
        }
        return Contents(snapshot.weights_of(self.model), training)

    def restore(self, contents: Contents) -> None:
        """Go back to what `contents` holds."""
        assert contents.training is not None
        training, processes = contents.training, contents.training["processes"]
        snapshot.load_weights_into(self.model, contents.weights)
        snapshot.load_optimizer_state(self.model, self._optimizer, training["optimizer"])
        self.step = training["step"]
        if self._captured is not None:
            # Captures know the optimiser's memory as it was.
            self._captured = self._captured_updates()
        self._meter = unpack(training["meter"], self.device)
        if len(processes) == self.world:
            self.carry = unpack(processes[self.rank]["carry"], self.device)
            snapshot.restore_generators(processes[self.rank]["generators"], self.device)
        elif any(process["carry"] is not None for process in processes):
            raise ValueError(
                f"the run carries state from batch to batch in {len(processes)} processes, each its own; "
                f"it cannot be resumed in {self.world}; start {len(processes)}, or train anew"
            )
        else:
            snapshot.seed_everything(self.config.seed + 1 + self.rank + 1_000_003 * self.step)
