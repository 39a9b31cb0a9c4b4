"""The sinks of the log beside JSON lines."""

import io
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fastweights.training.runs import log
from tests.training.tiny import run


def test_a_bar_on_a_terminal(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    run(tmp_path, console=console)
    assert "training" in console.file.getvalue()


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path, steps=3, tensorboard=True)
    assert any((tmp_path / "tensorboard").iterdir())


def test_wandb_asked_for_and_absent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb was asked for"):
        run(tmp_path, wandb="project")


def test_wandb_gets_the_scalars_of_one_run(tmp_path, monkeypatch):
    class Fake:
        logged, started, finished = [], [], 0

        class util:
            generate_id = staticmethod(lambda: "abc")

        @classmethod
        def init(cls, **options):
            cls.started.append(options)
            return cls

        @classmethod
        def log(cls, scalars, step):
            cls.logged.append((step, scalars))

        @classmethod
        def finish(cls):
            cls.finished += 1

    monkeypatch.setitem(sys.modules, "wandb", Fake)
    run(tmp_path, wandb="project", minutes=0.0)
    run(tmp_path, wandb="project")
    assert [options["id"] for options in Fake.started] == ["abc", "abc"] and Fake.finished == 2
    assert {"train/loss", "valid/loss"} <= {name for _, scalars in Fake.logged for name in scalars}


def test_long_steps_show_that_training_lives(monkeypatch):
    """Steps of 1.5 seconds: a line within five seconds, then one a minute, although no record is due."""
    clock, text = [0.0], io.StringIO()
    monkeypatch.setattr(log.time, "monotonic", lambda: clock[0])
    terminal = log.Terminal(Console(file=text), 1000, 0)
    for step in range(1, 101):
        clock[0] += 1.5
        terminal.advance(step)
    assert text.getvalue().splitlines() == ["step 2/1000", "step 42/1000", "step 82/1000"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_this_process_is_in_bytes():
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert log.memory_in_use(torch.device("cpu")) == pytest.approx(1024 * int(peak.split()[1]), rel=0.1)
