"""Settings by name: which of them are the model's, the task's and those of `TrainingConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from fastweights.common.tables import look_up
from fastweights.training.engine.config import (
    COMPILE_MODES,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    STRATEGIES,
    TrainingConfig,
)

_NAMES: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "strategy": STRATEGIES,
    "schedule": tuple(SCHEDULES),
    "optimizer": OPTIMIZERS,
    "compile": COMPILE_MODES,
}


class Fields:
    """What can be set for one kind of task.

    Args:
        model: the dataclass of the model's configuration.
        task: the task's own fields and their types.
        decided: fields that cannot be set, and why.
    """

    def __init__(self, model: type, task: Mapping[str, Any], decided: Mapping[str, str]) -> None:
        self.model = tuple(f.name for f in fields(model) if f.name not in decided)
        self.task = tuple(task)
        self.training = tuple(f.name for f in fields(TrainingConfig))
        self.decided = decided
        self._config, self._task_types = model, task

    def types(self) -> dict[str, Any]:
        """The type of each field, for what comes as text."""
        return {**get_type_hints(self._config), **get_type_hints(TrainingConfig), **self._task_types}

    def check(self, name: str) -> None:
        """A ValueError for a name that cannot be set, with the nearest that can."""
        if name in self.decided:
            raise ValueError(f"{name} cannot be set: it {self.decided[name]}")
        look_up(dict.fromkeys([*self.model, *self.task, *self.training]), name, "field")

    def sort(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The settings of model, task and training."""
        for name, value in settings.items():
            self.check(name)
            if name in _NAMES and isinstance(value, str):
                look_up(dict.fromkeys(_NAMES[name]), value, name)
        parts = [{n: v for n, v in settings.items() if n in part} for part in (self.model, self.task, self.training)]
        return parts[0], parts[1], parts[2]
