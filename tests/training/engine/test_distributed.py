"""Two processes on one machine learn what one process learns from the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_fabric.strategies import SingleDeviceStrategy

from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.training.engine.distributed import launch
from fastweights.training.runs.log import read_log
from tests.training import small_pairs
from tests.training.tiny import TinyBlocks, TinyTask, config, losses, quiet, run

SCRIPT = Path(__file__).parents[1] / "processes.py"
PLAIN = {"dropout": 0.0}
RAGGED = {"dropout": 0.0, "ragged": True, "carried": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """All runs of `processes.py`, and what each raised in the first and in the second process."""
    out = tmp_path_factory.mktemp("pair")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, out], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "changes"),
    [
        ("ddp", PLAIN, {}),
        ("ddp-muon", PLAIN, {"optimizer": "muon"}),
        ("auto", RAGGED, {"accumulate": 2}),
        ("fsdp", PLAIN, {}),
        ("fsdp-accumulated", RAGGED, {"accumulate": 2}),
    ],
)
def test_the_losses_of_one_process(tmp_path, pair, name, options, changes):
    run(tmp_path, (TinyBlocks if "optimizer" in changes else TinyTask)(**options), **changes)
    for kind, value in [("train", "loss"), ("train", "grad_norm"), ("train", "tokens"), ("valid", "loss")]:
        theirs = dict(losses(pair[0] / name, kind, value))
        assert theirs and theirs == pytest.approx(dict(losses(tmp_path, kind, value)), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "whole"), [("ddp-stopped", "ddp-dropout"), ("fsdp-stopped", "fsdp")])
def test_a_signal_to_one_process_stops_both_and_they_go_on_bit_by_bit(pair, stopped, whole):
    out, raised = pair
    assert [found[stopped] for found in raised] == ["Interrupted: 143"] * 2
    assert losses(out / stopped) == losses(out / whole)
    events = [(r["event"], r["step"]) for r in read_log(out / stopped / "log.jsonl") if r["kind"] == "event"]
    assert events == [("started", 0), ("interrupted", 5), ("resumed", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_translate_as_one(tmp_path, pair, strategy):
    corpus = ParallelCorpus.load(pair[0] / "text" / "pairs")
    small_pairs.run(corpus, tmp_path, accumulate=2, steps=6)
    found = [("train", "loss"), ("train", "nll"), ("train", "grad_norm"), ("train", "tokens"), ("valid", "loss")]
    for kind, value in [*found, ("valid", "bleu")]:
        theirs = dict(losses(pair[0] / f"translation-{strategy}", kind, value))
        assert theirs and theirs == pytest.approx(dict(losses(tmp_path, kind, value)), rel=2e-5)


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_shared_out(tmp_path, pair):
    assert run(pair[0] / "fsdp-half", TinyTask(dropout=0.0, carried=False)).finished
    run(tmp_path, TinyTask(dropout=0.0, carried=False))
    theirs = dict(losses(pair[0] / "fsdp-half"))
    assert theirs == pytest.approx(dict(losses(tmp_path)), rel=2e-5)


@pytest.mark.slow
def test_carried_states_need_as_many_processes_as_before(pair):
    # The free settings may change, so a checkpoint of the middle is asked for again after its end was lost.
    (pair[0] / "fsdp-stopped" / "checkpoints" / "step-00000012" / "training.pt").unlink()
    with pytest.raises(ValueError, match="carries state from batch to batch in 2 processes"):
        run(pair[0] / "fsdp-stopped", TinyTask(dropout=0.0), console=quiet())


@pytest.mark.slow
def test_errors_reach_both_processes(pair):
    for found in pair[1]:
        assert found["refused"].startswith("RunError") and "task.dropout: 0.0 there, 0.5 asked for" in found["refused"]
        assert found["diverged"].startswith("Diverged: the loss or gradient of step 8")
        assert "ValueError: optimizer 'muon' needs whole matrices, and strategy 'fsdp' cuts" in found["fsdp-muon"]
    assert set(pair[1][0]) == {"ddp-stopped", "fsdp-stopped", "fsdp-half", "fsdp-muon", "refused", "diverged"}


def test_torchrun_has_the_last_word_on_processes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ValueError, match="torchrun has started 2 processes"):
        launch(config(devices=3))
    with pytest.raises(ValueError, match="strategy 'single' is for one process, not 2"):
        launch(config(strategy="single"))


def test_one_process_needs_no_strategy_for_many():
    assert isinstance(launch(config()).strategy, SingleDeviceStrategy)


def test_without_lightning(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(ImportError, match=r"pip install 'fastweights\[train\]'"):
        run(tmp_path)
