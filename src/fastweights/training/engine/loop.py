"""Training: update, log, validate, save, and resume after anything.

    result = train(task, TrainingConfig(steps=20_000), "runs/delta")

`task` says what is learned (see `task.Task`), the configuration how. The same call resumes a run that was stopped,
and after a kill on a CPU its losses are the same bits as those of a run that was never stopped. Under torchrun, or with
`devices=2`, it trains in several processes; `out` must then be visible to all of them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fastweights.training.engine.config import TrainingConfig
from fastweights.training.engine.diagnosis import Diverged, examine
from fastweights.training.engine.distributed import launch, maximum_over_processes, on_first_process
from fastweights.training.engine.learner import Learner
from fastweights.training.engine.optim import learning_rate
from fastweights.training.engine.task import Task
from fastweights.training.runs import checkpoint as checkpoints
from fastweights.training.runs.checkpoint import CheckpointError, CheckpointStore, Contents
from fastweights.training.runs.folder import open_folder
from fastweights.training.runs.log import RunLog, Sink, memory_in_use
from fastweights.training.runs.signals import Interrupted, Signals
from fastweights.training.runs.snapshot import weights_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True, kw_only=True)
class Result:
    """Where a run stands.

    Args:
        step: updates made.
        finished: whether those are all; otherwise its minutes were over.
        validation: scores of the last validation, empty without one.
        best: scores of the best checkpoint, empty without one.
        checkpoint: the last checkpoint.
        wall_s: seconds of training, validation and saving, over all stretches.
    """

    step: int
    finished: bool
    validation: dict[str, float]
    best: dict[str, float]
    checkpoint: Path
    wall_s: float


def train(
    task: Task,
    config: TrainingConfig,
    out: Path | str,
    *,
    fresh: bool = False,
    minutes: float | None = None,
    about: dict[str, Any] | None = None,
    console: Console | None = None,
    watch: Sink | None = None,
) -> Result:
    """Train `task`, or resume the run of the same configuration in `out`.

    A checkpoint that cannot be written, as on a full disk, is reported; the one before it stays and training continues,
    to try again when the next is due. At the end of a run, or of its minutes, there is no next: CheckpointError.

    Args:
        fresh: start from the beginning; a run in `out` is moved to `out/previous-1`.
        minutes: stop after this time, with everything saved, to be resumed later.
        about: where the run is made (commit, machine), for `config.json`.
        console: to print on.
        watch: gets every record of the log too.

    Raises:
        RunError: `out` holds a run of another configuration, is in use, or cannot be written to.
        CheckpointError: no checkpoint of the run in `out` is whole, or the last one could not be written.
        Diverged: a loss or gradient was not finite. The weights in `out` are those before that update.
        Interrupted: Ctrl-C or SIGTERM, with everything saved; an exit with code 130 or 143.
    """
    out = Path(out)
    fabric = launch(config)
    log = RunLog(console)
    store = CheckpointStore(out / "checkpoints", config.keep, log.warn)

    with ExitStack() as held:

        def prepare() -> Path | None:
            open_folder(out, task.describe(), config, about or {}, fresh, held)
            store.clear_temporaries()
            newest = store.newest()
            return newest[0].folder if newest else None

        source = on_first_process(fabric, prepare)
        learner = Learner(fabric, task, config)
        trainer = _Trainer(fabric, task, config, learner, store, log)
        if source is not None:
            trainer.restore(source)
        with log, Signals() as signals:
            on_first_process(fabric, lambda: log.open(out, config, task.describe(), learner.step, watch))
            return trainer.run(signals, minutes)


class _Trainer:
    """Makes updates until the end, with log, validations and checkpoints between them."""

    def __init__(
        self, fabric: Fabric, task: Task, config: TrainingConfig, learner: Learner, store: CheckpointStore, log: RunLog
    ) -> None:
        self.fabric, self.task, self.config = fabric, task, config
        self.learner, self.store, self.log = learner, store, log
        self.wall_before = 0.0
        self.start = self.saved_at = self.logged_at = time.monotonic()
        self.paused_s = 0.0
        self.tokens = 0.0
        self.tokens_before_resume = 0.0
        self.validation: dict[str, float] = {}
        self.validated = -1
        self.saved: Path | None = None
        self.saved_step = -1

    def restore(self, source: Path) -> None:
        _, contents = checkpoints.read(source)
        assert contents.training is not None
        self.learner.restore(contents)
        totals = contents.training["totals"]
        self.wall_before, self.tokens = totals["wall_s"], totals["tokens"]
        self.validation, self.validated = totals["validation"], totals["validated"]
        self.saved, self.saved_step = source, self.learner.step
        self.tokens_before_resume = self.learner.unread_tokens()

    @property
    def wall(self) -> float:
        return self.wall_before + time.monotonic() - self.start

    def run(self, signals: Signals, minutes: float | None) -> Result:
        learner, config = self.learner, self.config
        event = {"event": "resumed" if learner.step else "started", "processes": self.fabric.world_size}
        self.log.write("event", learner.step, **event, device=str(self.fabric.device), time=time.time())
        if 0 < learner.step < config.steps:
            self.log.say(f"resuming from step {learner.step} of {config.steps} ({self.saved})")
        deadline = None if minutes is None else self.start + 60 * minutes
        while learner.step < config.steps:
            learner.advance()
            step = learner.step
            last = step == config.steps
            self.log.advance(step)
            if last or step % config.log_every == 0:
                self.check()
                self.write_log()
            elif self.fabric.device.type == "cpu":
                self.check()
            if last or (config.eval_every is not None and step % config.eval_every == 0):
                self.validate()
            stop, save, over = self.decide(signals, deadline)
            if last or stop or save or over:
                self.save(final=last or bool(stop) or bool(over))
            if stop:
                assert self.saved is not None
                self.log.write("event", step, event="interrupted", signal=stop)
                self.log.say(f"stopped at step {step}, saved in {self.saved}; the same command resumes from there")
                raise Interrupted(stop, step, self.saved)
            if over and not last:
                self.log.say(f"limit of {minutes:g} min reached at step {step}; the same command resumes from there")
                break
        assert self.saved is not None
        return Result(
            step=learner.step,
            finished=learner.step == config.steps,
            validation=self.validation,
            best=on_first_process(self.fabric, self.store.best_scores),
            checkpoint=self.saved,
            wall_s=self.wall,
        )

    def decide(self, signals: Signals, deadline: float | None) -> tuple[int, int, int]:
        """Say whether a signal came, a checkpoint is due and time is over: the same in all processes."""
        config, step, now = self.config, self.learner.step, time.monotonic()
        due = config.checkpoint_every is not None and step % config.checkpoint_every == 0
        if self.fabric.world_size > 1 and step % config.log_every and not due:
            return 0, 0, 0
        minutes = config.checkpoint_minutes
        due = due or (minutes is not None and now - self.saved_at >= 60 * minutes)
        asked = [signals.received, int(due), int(deadline is not None and now >= deadline)]
        stop, save, over = maximum_over_processes(self.fabric, asked)
        return stop, save, over

    def check(self) -> None:
        """Raise Diverged when a loss or gradient was not finite."""
        step = self.learner.broken_at()
        if step is None:
            return
        loss, report = examine(self.learner.model, lambda: self.learner.repeat(step))
        error = Diverged(step, loss, report, self.saved)
        self.log.write("event", step, event="diverged", report=str(error))
        raise error

    def write_log(self) -> None:
        values = self.learner.read()
        now = time.monotonic()
        spent = max(now - self.logged_at - self.paused_s, 1e-9)
        self.logged_at, self.paused_s = now, 0.0
        tokens = values.pop("tokens")
        values.pop("steps")
        speed = (tokens - self.tokens_before_resume) / spent
        self.tokens_before_resume = 0.0
        self.tokens += tokens
        self.log.write(
            "train",
            self.learner.step,
            **values,
            lr=learning_rate(self.config, self.learner.step - 1),
            tokens=self.tokens,
            tokens_per_s=speed,
            memory_bytes=memory_in_use(self.fabric.device),
            wall_s=self.wall,
        )

    def validate(self) -> None:
        self.check()
        begin = time.monotonic()
        measured = self.learner.validate()
        # Processes may differ in the last digit, and must agree on what is best.
        scores = on_first_process(self.fabric, lambda: measured)
        self.validation, self.validated = scores, self.learner.step
        if scores:
            score = self.task.score
            if score.name not in scores:
                raise ValueError(
                    f"validation must give {score.name!r}, by which checkpoints are compared; got {scores}"
                )
            known = on_first_process(self.fabric, self.store.best_scores)
            best = score.beats(scores[score.name], known.get(score.name))
            self.log.write("valid", self.learner.step, **scores, best=best, wall_s=self.wall)
            if best:
                self.write(Contents(weights_of(self.learner.model), None), scores, final=False)
        self.paused_s += time.monotonic() - begin

    def save(self, final: bool) -> None:
        """Save a checkpoint, unless this step has one."""
        if self.saved_step == self.learner.step:
            return
        self.check()
        begin = time.monotonic()
        contents = self.learner.contents()
        assert contents.training is not None
        contents.training["totals"] = {
            "wall_s": self.wall,
            "tokens": self.tokens,
            "validation": self.validation,
            "validated": self.validated,
        }
        target = self.write(contents, self.validation if self.validated == self.learner.step else {}, final)
        if target is not None:
            self.saved, self.saved_step = target, self.learner.step
        self.saved_at = time.monotonic()
        self.paused_s += self.saved_at - begin

    def write(self, contents: Contents, scores: dict[str, float], final: bool) -> Path | None:
        step = self.learner.step

        def attempt() -> tuple[Path | None, str]:
            try:
                return self.store.save(step, contents, scores), ""
            except OSError as error:
                return None, f"the checkpoint of step {step} could not be written ({error.strerror or error})"

        target, failure = on_first_process(self.fabric, attempt)
        if failure:
            before = f"the last good one is {self.saved}" if self.saved else "there is no earlier one"
            if final:
                raise CheckpointError(f"{failure}; {before}; make room and train again to resume from it")
            if self.fabric.is_global_zero:
                self.log.warn(f"{failure}; {before}; training continues")
            self.log.write("event", step, event="checkpoint failed", reason=failure)
        return target
