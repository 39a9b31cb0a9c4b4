"""How to train: numbers that decide the outcome, others that only decide how it is reached, and settings by name."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from fastweights.common.tables import check_name

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
STRATEGIES = ("auto", "single", "ddp", "fsdp")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Those that make CUDA graphs of the loss alone.
GRAPHING_MODES = ("reduce-overhead", "max-autotune")
OPTIMIZERS = ("adam", "muon")
# Share of the full rate at update t of T, counted from 0, once the warm-up of w updates is over; c is the cooldown.
SCHEDULES: dict[str, Callable[[int, int, int, float], float]] = {
    "cosine": lambda t, T, w, c: 0.5 * (1 + math.cos(math.pi * t / T)),
    "inverse_sqrt": lambda t, T, w, c: math.sqrt(max(w, 1) / max(t, 1)),
    "linear": lambda t, T, w, c: 1 - (t - w) / (T - w),
    "trapezoid": lambda t, T, w, c: min(1.0, (T - t) / (c * T)),
    "constant": lambda t, T, w, c: 1.0,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": tuple(SCHEDULES),
    "precision": PRECISIONS,
    "strategy": STRATEGIES,
    "optimizer": OPTIMIZERS,
    "compile": COMPILE_MODES,
}


def _free(default: Any) -> Any:
    """Make a field that may differ when a run is resumed."""
    return field(default=default, metadata={"free": True})


def _only(default: Any, owner: str, value: str) -> Any:
    """Make a field that does something only where `owner` has that value.

    Elsewhere it is not described, so that what was named by its description before there was such a field keeps its
    name.
    """
    return field(default=default, metadata={"only": (owner, value)})


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of `train`; the defaults are those of the authors' language models.

    Args:
        steps: updates of the weights.
        lr, warmup, schedule: see `optim.learning_rate`.
        cooldown: the share of the steps, at their end, in which "trapezoid" falls to 0.
        optimizer: "adam"; or "muon" for the matrices inside the task's `regions`, with Adam for all else.
        muon_lr: the full rate of Muon's matrices, where `lr` is that of all else.
        first_step_full: the very first update takes the full `lr`, as the authors' code does by setting the rate after
            the update; otherwise it takes the rate of the second.
        betas, eps: of Adam.
        weight_decay: decoupled (AdamW), on weights of two and more dimensions.
        clip: largest global norm of the gradient; None leaves it as it is.
        accumulate: batches in one update.
        precision: "32-true", "bf16-mixed" (autocast, float32 weights), "bf16-true" or "64-true".
        seed: of initial weights, dropout and the order of shuffled text; process r draws its dropout from seed + 1 + r.
        eval_every: updates between validations; None for one at the end.
        log_every: updates between lines of the log. On a GPU the host waits for the device only then, and several
            processes agree only then to heed a signal or the clock.
        checkpoint_every, checkpoint_minutes: updates and minutes between checkpoints; there is always one at the end.
        keep: checkpoints kept beside the best.
        compile: mode of `torch.compile` for `Task.loss`; None to run it as it is. "reduce-overhead" uses CUDA graphs.
        graph: record whole updates, optimiser included, as CUDA graphs; for one process on a GPU. The mode of `compile`
            must then be one without graphs of its own.
        accelerator, devices, nodes, strategy: as in Lightning Fabric; "auto" takes one device, or what torchrun has
            started, with DDP for more than one process.
        tensorboard: write TensorBoard files where it is installed.
        wandb: project to log to; None for none.

    The fields from `eval_every` on may be changed when a run is resumed. More steps, another rate or another batch
    would be another run.
    """

    steps: int
    lr: float = 2.5e-4
    warmup: int = 2000
    schedule: str = "cosine"
    first_step_full: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = 0.25
    accumulate: int = 1
    precision: str = "32-true"
    seed: int = 1111
    cooldown: float = _only(0.2, "schedule", "trapezoid")
    optimizer: str = _only("adam", "optimizer", "muon")
    muon_lr: float = _only(0.02, "optimizer", "muon")
    eval_every: int | None = _free(4000)
    log_every: int = _free(200)
    checkpoint_every: int | None = _free(None)
    checkpoint_minutes: float | None = _free(10.0)
    keep: int = _free(2)
    compile: str | None = _free(None)
    graph: bool = _free(False)
    accelerator: str = _free("auto")
    devices: int | str = _free("auto")
    nodes: int = _free(1)
    strategy: str = _free("auto")
    tensorboard: bool = _free(True)
    wandb: str | None = _free(None)

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "eval_every", "log_every", "checkpoint_every", "keep", "nodes"):
            value = getattr(self, name)
            optional = name in ("eval_every", "checkpoint_every")
            if not (isinstance(value, int) and value >= 1) and not (optional and value is None):
                raise ValueError(f"{name} must be a whole number of at least 1{' or None' * optional}, got {value!r}")
        for name in ("clip", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, or None for none, got {value!r}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0 steps, got {self.warmup!r}")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"lr must be a finite number of at least 0, got {self.lr!r}")
        for name, known in _CHOICES.items():
            value, optional = getattr(self, name), name == "compile"
            if value not in known and not (optional and value is None):
                raise ValueError(f"{name} must be {'None or ' * optional}one of {', '.join(known)}, got {value!r}")
        if not 0 < self.cooldown <= 1:
            raise ValueError(f"cooldown must be a share of the steps above 0 and at most 1, got {self.cooldown!r}")
        if self.optimizer == "muon" and not (self.lr > 0 and 0 < self.muon_lr < math.inf):
            raise ValueError(f"optimizer 'muon' needs lr and muon_lr above 0, got {self.lr!r} and {self.muon_lr!r}")
        for name, (owner, value) in self.idle(vars(self)).items():
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name} is for {owner} {value!r}; with {getattr(self, owner)!r} leave it out")
        if self.graph and self.compile in GRAPHING_MODES:
            others = [mode for mode in COMPILE_MODES if mode not in GRAPHING_MODES]
            raise ValueError(
                f"graph records the whole update, compile = {self.compile!r} the loss alone; choose one of the two, "
                f"or compile = {' or '.join(map(repr, others))}"
            )

    def describe(self) -> dict[str, Any]:
        """Return all fields that do something, for JSON."""
        idle = self.idle(vars(self))
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name not in idle}))

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return the names of fields that do nothing beside these values, and which field would need which value."""
        owned = {f.name: f.metadata["only"] for f in fields(cls) if "only" in f.metadata}
        return {name: only for name, only in owned.items() if values.get(only[0], getattr(cls, only[0])) != only[1]}

    @classmethod
    def free(cls) -> set[str]:
        """Return the names of the fields that may differ when a run is resumed."""
        return {f.name for f in fields(cls) if f.metadata.get("free")}


class Fields:
    """The settings of one kind of task: which of them are the model's, the task's and those of `TrainingConfig`.

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
        """Return the type of each field, for values that come as text."""
        return {**get_type_hints(self._config), **get_type_hints(TrainingConfig), **self._task_types}

    def check(self, name: str) -> None:
        """Refuse a name that cannot be set with a ValueError that has the nearest that can."""
        if name in self.decided:
            raise ValueError(f"{name} cannot be set: it {self.decided[name]}")
        check_name([*self.model, *self.task, *self.training], name, "field")

    def sort(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Divide settings into those of model, task and training."""
        for name, value in settings.items():
            self.check(name)
            if name in _CHOICES and isinstance(value, str):
                check_name(_CHOICES[name], value, name)
        parts = [{n: v for n, v in settings.items() if n in part} for part in (self.model, self.task, self.training)]
        return parts[0], parts[1], parts[2]


ModelConfig = TypeVar("ModelConfig")


class TrainingPlan(NamedTuple, Generic[ModelConfig]):
    """Everything that decides a training but the data: the model, the task's arguments and the configuration."""

    model: ModelConfig
    task: dict[str, Any]
    training: TrainingConfig


def plan_training(
    recipe: Mapping[str, Any], changes: Mapping[str, Any], *, eval_every: int, log_every: int
) -> TrainingConfig:
    """Make the configuration of a preset's recipe with some settings changed.

    With other `steps` than the recipe's the warm-up is at most a tenth of them. There are at least ten validations and
    fifty lines of log, whatever their usual intervals are. What would do nothing beside the changes is dropped from the
    recipe: the rate of an optimiser goes with it.
    """
    idle = TrainingConfig.idle({**recipe, **changes})
    settings = {**{name: value for name, value in recipe.items() if name not in idle}, **changes}
    steps = settings["steps"]
    check_positive({"lr": TrainingConfig.lr, **settings}, "steps", "lr")
    if "warmup" not in changes:
        usual = recipe.get("warmup", TrainingConfig.warmup)
        settings["warmup"] = usual if steps == recipe["steps"] else min(usual, steps // 10)
    if not 0 <= settings["warmup"] <= steps:
        raise ValueError(f"warmup must be from 0 to steps = {steps}, got {settings['warmup']}")
    intervals = {"eval_every": min(eval_every, max(1, steps // 10)), "log_every": min(log_every, max(1, steps // 50))}
    return TrainingConfig(**{**intervals, **settings})


def check_positive(settings: Mapping[str, Any], *names: str) -> None:
    """Refuse numbers of 0 and below."""
    for name in names:
        if settings[name] <= 0:
            raise ValueError(f"{name} must be above 0, got {settings[name]}")
