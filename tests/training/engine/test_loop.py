"""The loop on one CPU: learning, logs, going on, stopping."""

import json
import os
import random
import shutil
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastweights.training.engine import loop
from fastweights.training.engine.diagnosis import Diverged
from fastweights.training.engine.task import LossOutcome, Score
from fastweights.training.runs.checkpoint import CheckpointError, load_weights
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.log import read_log
from fastweights.training.runs.signals import Interrupted
from tests.training.tiny import EPOCH, TinyTask, config, losses, quiet, run


class StopsAt(TinyTask):
    """Gets a signal while the batch of a step is made."""

    def __init__(self, step, number, **options):
        super().__init__(**options)
        self.step, self.number = step, number

    def batch(self, index, rank, world):
        if index == self.step:
            os.kill(os.getpid(), self.number)
        return super().batch(index, rank, world)


def test_learns_and_reports(tmp_path):
    console = quiet()
    result = run(tmp_path, console=console, steps=60, warmup=5, schedule="constant", log_every=20, eval_every=20)
    curve = losses(tmp_path)
    assert [step for step, _ in curve] == [20, 40, 60]
    assert curve[-1][1] < 0.8 * curve[0][1]
    assert result.finished and result.step == 60 and result.best["loss"] <= result.validation["loss"]
    record = [r for r in read_log(tmp_path / "log.jsonl") if r["kind"] == "train"][-1]
    assert record["tokens"] == 60 * 4 * 6
    assert {"lr", "grad_norm", "tokens_per_s", "memory_bytes", "wall_s", "largest"} <= record.keys()
    printed = console.file.getvalue()
    assert "step 60/60  loss" in printed and "validation" in printed and "best so far" in printed
    assert json.loads((tmp_path / "config.json").read_text())["training"]["lr"] == 0.02


def test_windows_of_the_log_are_means(tmp_path):
    run(tmp_path / "each", log_every=1, steps=6)
    run(tmp_path / "three", log_every=3, steps=6)
    each = [loss for _, loss in losses(tmp_path / "each")]
    expected = {3: sum(each[:3]) / 3, 6: sum(each[3:]) / 3}
    assert dict(losses(tmp_path / "three")) == pytest.approx(expected, rel=1e-12)


def test_a_finished_run_is_not_trained_again(tmp_path):
    console = quiet()
    first = run(tmp_path, console=console)
    again = run(tmp_path, console=console)
    assert "resuming" not in console.file.getvalue()
    assert (again.step, again.finished, again.best) == (first.step, True, first.best)
    assert len(losses(tmp_path)) == 12


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 11])
def test_stretches_give_the_losses_of_one_run(tmp_path, stop):
    run(tmp_path / "whole", log_every=2)
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", StopsAt(stop - 1, signal.SIGTERM), log_every=2)
    # Nothing but the checkpoint may lead the way.
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    result = run(tmp_path / "parts", log_every=2)
    for kind in ("train", "valid"):
        assert losses(tmp_path / "parts", kind) == losses(tmp_path / "whole", kind)
    assert result.best == run(tmp_path / "whole", log_every=2).best


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_say_how_to_go_on(tmp_path, number, code):
    console = quiet()
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped:
        run(tmp_path, StopsAt(4, number), console=console)
    assert (stopped.value.code, stopped.value.step) == (code, 5)
    assert stopped.value.checkpoint.name == "step-00000005"
    assert "the same command resumes" in console.file.getvalue()
    assert signal.getsignal(number) is before


def test_minutes_end_a_stretch(tmp_path):
    result, console = run(tmp_path, minutes=0.0), quiet()
    assert (result.step, result.finished) == (1, False)
    assert run(tmp_path, console=console).finished
    assert "resuming from step 1 of 12" in console.file.getvalue()


class Timed(TinyTask):
    """Takes 2 seconds for a batch and 100 for a validation, on a clock of its own."""

    seconds = 0.0

    def batch(self, index, rank, world):
        self.seconds += 2
        return super().batch(index, rank, world)

    def validate(self, model):
        self.seconds += 100
        return super().validate(model)


def run_timed(out, monkeypatch, **settings):
    task = Timed()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: task.seconds, time=time.time))
    return run(out, task, **settings)


def test_speed_is_that_of_training_alone(tmp_path, monkeypatch):
    """24 tokens in 2 seconds, without the time of validations and whatever was learned before a stop."""
    stopped = run_timed(tmp_path, monkeypatch, log_every=4, checkpoint_every=None, minutes=0.1)
    assert (stopped.step, stopped.wall_s) == (3, 6.0)
    finished = run_timed(tmp_path, monkeypatch, log_every=4, checkpoint_every=None)
    assert finished.wall_s == 24 + 3 * 100
    assert losses(tmp_path, name="tokens_per_s") == [(4, 12.0), (8, 12.0), (12, 12.0)]
    assert losses(tmp_path, name="wall_s") == [(4, 8.0), (8, 116.0), (12, 224.0)]
    assert losses(tmp_path, name="tokens") == [(4, 96), (8, 192), (12, 288)]


def test_checkpoints_by_the_clock(tmp_path, monkeypatch):
    changes = {"eval_every": None, "checkpoint_every": None, "checkpoint_minutes": 8 / 60, "keep": 9, "steps": 10}
    run_timed(tmp_path, monkeypatch, **changes)
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert found == ["step-00000004", "step-00000008", "step-00000010"]


def test_another_configuration_is_refused_by_name(tmp_path):
    run(tmp_path, steps=3)
    with pytest.raises(RunError) as refused:
        run(tmp_path, TinyTask(dropout=0.5), steps=3, lr=0.5)
    assert "training.lr: 0.02 there, 0.5 asked for" in str(refused.value)
    assert "task.dropout: 0.1 there, 0.5 asked for" in str(refused.value)
    assert "seed" not in str(refused.value)
    run(tmp_path, steps=3, log_every=3, keep=5)
    run(tmp_path, TinyTask(dropout=0.5), steps=3, lr=0.5, fresh=True)
    assert (tmp_path / "previous-1" / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.parametrize("settings", [{}, {"lr": 0.5}])
def test_checkpoints_without_their_configuration_are_refused(tmp_path, settings):
    run(tmp_path)
    (tmp_path / "config.json").unlink()
    for _ in range(2):
        with pytest.raises(RunError, match=r"holds checkpoints without their config\.json"):
            run(tmp_path, **settings)
        # The best alone would be taken for that of the new run.
        for folder in (tmp_path / "checkpoints").glob("step-*"):
            shutil.rmtree(folder)
    assert run(tmp_path, fresh=True, **settings).finished


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"3", b"[1]", b"null", b'{"step": 1}', b'{"kind": "train", "step": "1"}', b"{", b"[" * 100_000],
)
def test_a_log_with_lines_that_are_no_records_does_not_stop_a_run(tmp_path, line):
    run(tmp_path)
    path, console = tmp_path / "log.jsonl", quiet()
    curve, before = losses(tmp_path), line + b"\n" + path.read_bytes()
    path.write_bytes(before)
    assert run(tmp_path, console=console).finished
    assert "log.jsonl has lines that are no records (1)" in console.file.getvalue()
    assert losses(tmp_path) == curve and (tmp_path / "log.jsonl.damaged").read_bytes() == before


def test_a_folder_has_one_run_at_a_time(tmp_path):
    class Nested(TinyTask):
        def validate(self, model):
            with pytest.raises(RunError, match="another process is training"):
                run(tmp_path)
            return super().validate(model)

    assert run(tmp_path, Nested()).finished


def test_temporary_files_of_a_killed_run_are_removed_after_a_day(tmp_path):
    for name, hours in (("old", 25), ("young", 1)):
        path = tmp_path / f".config.json.{name}.tmp"
        path.write_text("{")
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    run(tmp_path, steps=1)
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [".config.json.young.tmp"]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write to"):
        run(tmp_path / "file")


@pytest.mark.parametrize("log_every", [1, 4])
def test_divergence_stops_with_statistics_and_the_last_good_checkpoint(tmp_path, log_every):
    with pytest.raises(Diverged) as stopped:
        run(tmp_path, TinyTask(poison=7), log_every=log_every)
    error = stopped.value
    assert error.step == 8 and error.checkpoint.name == "step-00000006"
    assert "step 8" in str(error) and "gradient of embedding.weight: 88 of 88 not finite" in str(error)
    # The update that went wrong was not made.
    assert all(not health.broken for health in error.report if health.kind == "parameter")
    assert read_log(tmp_path / "log.jsonl")[-1]["event"] == "diverged"
    assert run(tmp_path).finished


def test_divergence_names_the_layer(tmp_path):
    class Overflows(TinyTask):
        def build(self):
            model = super().build()
            model.layers[1].out.weight.data[0, 0] = float("inf")
            return model

    with pytest.raises(Diverged, match=r"output of layers.1.out: \d+ of") as stopped:
        run(tmp_path, Overflows())
    assert stopped.value.checkpoint is None
    first = next(health for health in stopped.value.report if health.broken)
    assert first.name == "layers.1.out"


def test_the_best_is_kept_and_higher_can_be_better(tmp_path):
    class Scored(TinyTask):
        score = Score("bleu", higher_is_better=True)
        values = iter([1.0, 5.0, 2.0])

        def validate(self, model):
            self.weights = [*getattr(self, "weights", []), model.head.weight.clone()]
            return {"bleu": next(self.values)}

    task = Scored()
    result = run(tmp_path, task)
    assert result.best == {"bleu": 5.0} and result.validation == {"bleu": 2.0}
    model = task.build()
    assert load_weights(model, tmp_path).step == 8
    torch.testing.assert_close(model.head.weight, task.weights[1], rtol=0, atol=0)
    assert load_weights(model, tmp_path, "last").step == 12
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_weights(model, tmp_path / "elsewhere")


def test_what_is_better():
    lower, higher = Score("loss"), Score("bleu", higher_is_better=True)
    assert lower.beats(1.0, 2.0) and not lower.beats(2.0, 1.0) and not higher.beats(1.0, 2.0) and higher.beats(2.0, 1.0)
    for score in (lower, higher):
        assert score.beats(1.0, None) and not score.beats(1.0, 1.0)
        assert not score.beats(float("nan"), None) and not score.beats(float("nan"), 1.0)


def test_validation_without_the_score(tmp_path):
    class Unscored(TinyTask):
        def validate(self, model):
            return {"accuracy": 1.0}

    with pytest.raises(ValueError, match="must give 'loss'"):
        run(tmp_path, Unscored())


def test_how_often_to_look_changes_nothing(tmp_path):
    class Draws(TinyTask):
        def validate(self, model):
            assert not model.training and not torch.is_grad_enabled()
            return {"loss": float(torch.rand(())) + random.random() + np.random.rand()}

    run(tmp_path / "often", Draws(), eval_every=1, checkpoint_every=1)
    run(tmp_path / "never", Draws(), eval_every=None, checkpoint_every=None)
    assert losses(tmp_path / "often") == losses(tmp_path / "never")


def test_accumulation_is_one_large_batch(tmp_path):
    class Joined(TinyTask):
        """The batches 2i and 2i+1 of the other task, which have unequal lengths, in one."""

        def batch(self, index, rank, world):
            return [super(Joined, self).batch(2 * index + part, rank, world) for part in range(2)]

        def loss(self, model, batch, carry):
            sums, tokens = 0.0, 0
            for part in batch:
                loss, metrics, _ = super().loss(model, part, None)
                sums, tokens = sums + loss * metrics["tokens"], tokens + metrics["tokens"]
            return LossOutcome(sums / tokens, {"tokens": tokens})

    options = {"dropout": 0.0, "carried": False, "ragged": True}
    run(tmp_path / "parts", TinyTask(**options), accumulate=2, precision="64-true")
    run(tmp_path / "joined", Joined(**options), precision="64-true")
    for name in ("loss", "grad_norm"):
        pairs = zip(losses(tmp_path / "parts", name=name), losses(tmp_path / "joined", name=name), strict=True)
        for (_, ours), (_, theirs) in pairs:
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_the_carry_is_cut_saved_and_dropped_at_epochs(tmp_path):
    seen = []

    class Watched(TinyTask):
        def loss(self, model, batch, carry):
            seen.append(carry)
            return super().loss(model, batch, carry)

    run(tmp_path, Watched(), steps=EPOCH + 2)
    assert seen[0] is None
    assert all(not state.W.requires_grad for carry in seen[1:] for state in carry)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precision_keeps_the_carry_as_the_model_made_it(tmp_path, precision):
    kinds = set()

    class Watched(TinyTask):
        def loss(self, model, batch, carry):
            outcome = super().loss(model, batch, carry)
            kinds.update((s.W.dtype, before.W.dtype) for s, before in zip(outcome.carry, carry or [], strict=False))
            return outcome

    run(tmp_path, Watched(), precision=precision)
    assert kinds and all(after == before for after, before in kinds)


def test_another_optimiser_goes_on_too(tmp_path):
    class Momentum(TinyTask):
        def optimizer(self, model, config):
            groups = [
                {"params": list(model.layers.parameters()), "scale": 10.0},
                {"params": [model.embedding.weight]},
            ]
            return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)

    class Stops(Momentum, StopsAt):
        pass

    run(tmp_path / "whole", Momentum())
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", Stops(6, signal.SIGTERM))
    run(tmp_path / "parts", Momentum())
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_bad_settings_are_named():
    for changes, words in [
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"schedule": "cosin"}, "schedule must be one of cosine"),
        ({"precision": "16"}, "precision must be one of 32-true"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"compile": "fast"}, "compile must be None or one of default"),
        ({"graph": True, "compile": "max-autotune"}, "or compile = 'default' or 'max-autotune-no-cudagraphs'"),
        ({"strategy": "dp"}, "strategy must be one of auto"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"eval_every": 0}, "eval_every must be a whole number of at least 1 or None"),
        ({"log_every": None}, "log_every must be a whole number of at least 1, got None"),
        ({"accumulate": 1.5}, "accumulate must be a whole number"),
        ({"checkpoint_minutes": 0}, "checkpoint_minutes must be positive, or None for none"),
        ({"lr": -0.1}, "lr must be a finite number of at least 0"),
        ({"schedule": "trapezoid", "cooldown": 0.0}, "cooldown must be a share of the steps above 0 and at most 1"),
        ({"schedule": "trapezoid", "cooldown": 1.1}, "cooldown must be a share"),
        ({"cooldown": 0.5}, "cooldown is for schedule 'trapezoid'; with 'cosine' leave it out"),
        ({"muon_lr": 0.5}, "muon_lr is for optimizer 'muon'"),
        ({"optimizer": "muon", "lr": 0.0}, "needs lr and muon_lr above 0"),
        ({"optimizer": "muon", "muon_lr": 0.0}, "needs lr and muon_lr above 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            config(**changes)
    least = {"steps": 1, "warmup": 0, "lr": 0.0, "eval_every": 1, "log_every": 1, "accumulate": 1, "keep": 1}
    assert config(**least).steps == 1 and config(schedule="trapezoid", cooldown=1.0).cooldown == 1
    assert config(eval_every=None, checkpoint_every=None, clip=None, checkpoint_minutes=None).clip is None
    assert config(graph=True, compile="default").graph
