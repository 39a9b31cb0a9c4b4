"""What a training job is to the loop: a model, batches by number, a loss and a score."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.training.engine.config import TrainingConfig

Carry = Any


class Score(NamedTuple):
    """The entry of `Task.validate` that decides which checkpoint is the best."""

    name: str
    higher_is_better: bool = False

    def beats(self, value: float, best: float | None) -> bool:
        """Say whether `value` is a new best; a tie and NaN are not."""
        if best is None:
            return value == value
        return value > best if self.higher_is_better else value < best


class LossOutcome(NamedTuple):
    """What `Task.loss` gives back.

    Args:
        loss: scalar, the mean over the tokens of the batch, with gradient.
        metrics: scalars (tensors or numbers) to be logged as means over tokens. "tokens", the number of tokens that
            `loss` is a mean of, is summed instead, and weighs the batch against the others of the same update.
        carry: what the next batch needs from this one, such as fast-weight states; None for nothing.
    """

    loss: Tensor
    metrics: dict[str, Tensor | float]
    carry: Carry = None


class Task(ABC):
    """A training job. Four methods are a must, the others have defaults.

    Attributes:
        score: what the best checkpoint is best at.
        many_shapes: whether batches come in many shapes, in no order. Then code is compiled once for all of them, and
            each shape that comes again is captured.
    """

    score: Score = Score("loss")
    many_shapes: bool = False

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model with fresh weights, drawn from torch's global generator."""

    @abstractmethod
    def batch(self, index: int, rank: int, world: int) -> Any:
        """Return part `rank` of `world` of batch `index`, counted from 0 over the whole run.

        It must depend on nothing else (no global generator, no iterator), so that a run can resume at any step. With
        gradient accumulation an update reads several batches. Tensors may be on any device; those elsewhere than the
        model are copied there.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, carry: Carry) -> LossOutcome:
        """Compute the loss of a batch, given what the batch before it carried over (None at the beginning).

        The loop cuts the carry off from the graph and saves it in checkpoints; it may be made of tensors, dataclasses,
        named tuples, lists, tuples, dicts and plain values. Where a batch starts an epoch, this method drops it. This
        is what `TrainingConfig.compile` compiles, so it should read nothing back from the device.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe for JSON all that decides the outcome beside `TrainingConfig`; other descriptions are other runs."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return scores of the model as it is, among them `score.name`; nothing for a task without validation.

        Called in evaluation mode without gradients, in every process with the same result.
        """
        return {}

    def place(self, device: torch.device) -> None:  # noqa: B027
        """Take note of the model's device, once, so that data can be put there ahead of time."""

    def regions(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return parts that are alike, such as the blocks of a stack: what is compiled for one serves them all.

        Without any, `loss` is compiled as a whole, which for a deep model takes minutes. Their matrices are those that
        `TrainingConfig.optimizer` "muon" is for.
        """
        return []

    def optimizer(self, model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer | None:
        """Return an optimiser, or None for the configuration's; a group's rate is the schedule's times its "scale"."""
        return None
