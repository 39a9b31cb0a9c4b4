"""Processes that are killed, and the bits of those that go on in their place."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny import losses, quiet, run

CHILD = Path(__file__).parents[1] / "child.py"
SIGNALS = ("SIGINT", "SIGTERM")
KILLS = ("training", "writing-training.pt", "writing-manifest.json")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of runs that were ended by force or by a signal, and their exit codes."""
    out = tmp_path_factory.mktemp("ended")
    command = [sys.executable, CHILD, out, *KILLS, *SIGNALS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return out, json.loads(line)
            _, way, number = line.split()
            os.kill(int(number), signal.Signals[way])
    raise AssertionError(f"{CHILD} ended with {process.returncode}")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "last_step"), [(KILLS[0], 7), (KILLS[1], 9), (KILLS[2], 9)])
def test_a_killed_run_goes_on_bit_by_bit(tmp_path, ended, way, last_step):
    folder, codes = ended
    out = folder / way
    assert codes[way] == -signal.SIGKILL
    assert losses(out)[-1][0] == last_step
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*"))[-1] == "step-00000006"
    console = quiet()
    assert run(out, console=console).finished
    assert "resuming from step 6 of 12" in console.file.getvalue()
    assert not list((out / "checkpoints").glob(".*"))
    assert run(tmp_path).finished
    for kind in ("train", "valid"):
        assert losses(out, kind) == losses(tmp_path, kind)
    assert losses(out, name="grad_norm") == losses(tmp_path, name="grad_norm")
    ours, theirs = (parent / "checkpoints" / "step-00000012" for parent in (out, tmp_path))
    assert (ours / "weights.safetensors").read_bytes() == (theirs / "weights.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_exit_codes_of_signals(ended, way, code):
    folder, codes = ended
    assert codes[way] == code
    assert (folder / way / "checkpoints" / "step-00000008").is_dir()
