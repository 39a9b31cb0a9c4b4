"""What to say when a loss is no longer a number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.common.sharding import is_sharded
from fastweights.common.tree import map_tensors

_LARGE = 1e4
_SHOWN = 12


class Health(NamedTuple):
    """One tensor of the model: how many of its `size` elements are not finite, and the largest of the others."""

    kind: str
    name: str
    broken: int
    size: int
    largest: float

    def __str__(self) -> str:
        trouble = f"{self.broken} of {self.size} not finite" if self.broken else f"largest {self.largest:.3g}"
        return f"{self.kind} {self.name}: {trouble}"


class Diverged(RuntimeError):
    """A loss or gradient that is not finite.

    Attributes:
        step: the update, counted from 1, in which it was first seen.
        loss: that of the update when it was repeated.
        report: the tensors of that update's model, forward order first.
        checkpoint: the last good one, None when there is none.
    """

    def __init__(self, step: int, loss: float, report: list[Health], checkpoint: Path | None) -> None:
        super().__init__(step, loss, report, checkpoint)
        self.step, self.loss, self.report, self.checkpoint = step, loss, report, checkpoint

    def __str__(self) -> str:
        notable = [health for health in self.report if health.broken]
        large = sorted((h for h in self.report if not h.broken and h.largest > _LARGE), key=lambda h: -h.largest)
        lines = [f"  {health}" for health in [*notable[:_SHOWN], *large[:_SHOWN]]]
        if len(notable) > _SHOWN:
            lines.insert(_SHOWN, f"  and {len(notable) - _SHOWN} more tensors that are not finite")
        if not lines:
            biggest = sorted(self.report, key=lambda health: -health.largest)[:3]
            lines = ["  all finite when the update was repeated; the largest:", *(f"  {health}" for health in biggest)]
        last = self.checkpoint
        where = f"the last good checkpoint is {last}" if last else "there is no checkpoint before it"
        what = f"the loss or gradient of step {self.step} is not finite (loss {self.loss:g} when repeated); {where}"
        return "\n".join([what, *lines, "  a lower learning rate, a longer warm-up or a smaller clip may help"])


def examine(model: nn.Module, run: Callable[[], Tensor]) -> tuple[float, list[Health]]:
    """Return the loss of `run`, and the health of all outputs of leaf modules in it, parameters and gradients."""
    report: list[Health] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            def note(tensor: Tensor) -> Tensor:
                report.append(_health("output of", name or type(module).__name__, tensor))
                return tensor

            map_tensors(note, output)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        loss = float(run())
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        report.append(_health("parameter", name, parameter))
        if parameter.grad is not None:
            report.append(_health("gradient of", name, parameter.grad))
    return loss, [health for health in report if health.size]


def _health(kind: str, name: str, tensor: Tensor) -> Health:
    with torch.no_grad():
        local = tensor.to_local() if is_sharded(tensor) else tensor
        if not local.is_floating_point():
            return Health(kind, name, 0, 0, 0.0)
        finite = torch.isfinite(local)
        largest = float(local.where(finite, 0).abs().max()) if local.numel() else 0.0
        return Health(kind, name, int((~finite).sum()), local.numel(), largest)
