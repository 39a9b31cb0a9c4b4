"""Checkpoints on disk: whole, proven, kept in the right number; damage and a full disk do no harm."""

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fastweights.common.tree import map_tensors, pack, unpack
from fastweights.ops.state import FastWeightState
from fastweights.training.engine.task import LossOutcome
from fastweights.training.runs import checkpoint as checkpoints
from fastweights.training.runs import snapshot
from fastweights.training.runs.checkpoint import (
    CheckpointError,
    CheckpointStore,
    Contents,
    DamagedCheckpoint,
    load_weights,
    read,
    read_chosen,
)
from fastweights.training.runs.log import read_log
from fastweights.training.runs.snapshot import weights_of
from tests.training.tiny import TinyTask, losses, quiet, run

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Readers look again at once."""
    monkeypatch.setattr(checkpoints, "_PAUSE_S", 0.0)


def contents(value=1.0):
    return Contents({"w": torch.full((2, 3), value)}, {"step": 3, "nested": [(1, "a"), None], "t": torch.arange(4)})


def full_disk(monkeypatch, when):
    """No space is left for the files that `when` picks; half of each arrives."""
    write = checkpoints._write

    def short(path, content):
        if when(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    monkeypatch.setattr(checkpoints, "_write", short)


def damage(path, how):
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "gone":
        path.unlink()
    else:
        path.write_text(how)


def test_round_trip(tmp_path):
    store = CheckpointStore(tmp_path)
    folder = store.save(3, contents(), {"loss": 2.0})
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "training.pt", "weights.safetensors"]
    checkpoint, found = store.newest()
    assert (checkpoint.step, checkpoint.scores, checkpoint.folder) == (3, {"loss": 2.0}, folder)
    assert torch.equal(found.weights["w"], torch.ones(2, 3))
    assert found.training["nested"] == [(1, "a"), None] and torch.equal(found.training["t"], torch.arange(4))


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(2, Contents({"w": torch.zeros(1)}, None), {"loss": 1.0})
    for step in range(1, 6):
        store.save(step, contents())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-00000002", "step-00000004", "step-00000005"]
    # Going on from an earlier step can find its best before the step of the old one.
    store.save(1, Contents({"w": torch.ones(1)}, None), {"loss": 0.5})
    assert read_chosen(tmp_path, "best")[0].step == 1 and store.best_scores() == {"loss": 0.5}


def test_saving_the_same_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, contents(1.0))
    store.save(3, contents(2.0))
    assert store.newest()[1].weights["w"][0, 0] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_kill_between_the_two_renames_of_a_replacement(tmp_path):
    store = CheckpointStore(tmp_path)
    folder = store.save(3, contents())
    folder.replace(tmp_path / ".step-00000003.replaced.tmp")
    (tmp_path / ".step-00000003.77.tmp").mkdir()
    store.clear_temporaries()
    assert store.newest()[0].step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in ("weights.safetensors", "training.pt") for how in ("cut", "flipped", "gone", "{}")),
        *(("manifest.json", how) for how in ("cut", "gone", "{}", "[]", "null")),
    ],
)
def test_damage_is_reported_and_the_one_before_is_used(tmp_path, name, how):
    warnings = []
    store = CheckpointStore(tmp_path, warn=warnings.append)
    store.save(3, contents(1.0))
    damage(store.save(6, contents(2.0)) / name, how)
    checkpoint, found = store.newest()
    assert checkpoint.step == 3 and found.weights["w"][0, 0] == 1.0
    assert len(warnings) == 1 and "step-00000006" in warnings[0] and "the one before it is used" in warnings[0]
    assert (tmp_path / "step-00000006.damaged").is_dir()


def test_nothing_whole_is_an_error_and_not_a_new_start(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.newest() is None
    damage(store.save(3, contents()) / "training.pt", "cut")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        store.newest()


def test_a_format_of_the_future(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.save(3, contents())
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads format 1"):
        read(folder)
    # No damage: neither a reader nor a training sets it aside.
    for use in (store.newest, partial(load_weights, nn.Linear(1, 1), tmp_path, "last")):
        with pytest.raises(CheckpointError, match="has format 99") as refused:
            use()
        assert not isinstance(refused.value, DamagedCheckpoint)
    assert folder.is_dir()


def test_a_disk_that_cannot_be_read_is_no_damage(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(3, contents(1.0))
    folder = store.save(6, contents(2.0))
    read_bytes = Path.read_bytes

    def fails(path):
        if path == folder / "weights.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.newest()
    monkeypatch.undo()
    assert store.newest()[0].step == 6


@pytest.mark.parametrize(
    "change",
    [
        {"step": "6"},
        {"scores": []},
        {"scores": {"loss": "low"}},
        {"files": []},
        {"files": {}},
        {"files": {"weights.safetensors": 3}},
        {"files": {"weights.safetensors": {"bytes": "many", "sha256": "0"}}},
        {"files": {"weights.safetensors": {"bytes": 1, "sha256": None}}},
        {"format": "one"},
    ],
)
def test_a_manifest_of_wrong_types_is_damage(tmp_path, change):
    store = CheckpointStore(tmp_path)
    store.save(3, contents(1.0))
    path = store.save(6, contents(2.0)) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert store.newest()[0].step == 3
    assert (tmp_path / "step-00000006.damaged").is_dir()


def everything_in(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("which", "name"), [("best", "best-00000012"), ("last", "step-00000012")])
def test_who_only_reads_gets_the_same_answer_twice_and_changes_nothing(tmp_path, which, name):
    run(tmp_path)
    (best,) = (tmp_path / "checkpoints").glob("best-*")
    best.replace(best.with_name("best-00000012"))
    damage(tmp_path / "checkpoints" / name / "weights.safetensors", "flipped")
    before, model = everything_in(tmp_path), TinyTask().build()
    for _ in range(2):
        other = "the last one" if which == "best" else "the one before it"
        with pytest.raises(DamagedCheckpoint, match=rf"checksum in its manifest; move it away to use {other}"):
            load_weights(model, tmp_path, which)
    assert everything_in(tmp_path) == before


def test_a_best_checkpoint_that_training_set_aside_is_not_replaced_by_the_last(tmp_path):
    run(tmp_path)
    (best,) = (tmp_path / "checkpoints").glob("best-*")
    damage(best / "manifest.json", "[]")
    assert run(tmp_path).best == {}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"the best checkpoint of .* was damaged and is kept as best-"):
            load_weights(TinyTask().build(), tmp_path)


@pytest.mark.parametrize("which", ["best", "last"])
@pytest.mark.parametrize("step", [1, 2])
def test_weights_can_be_loaded_while_the_folder_is_trained(tmp_path, monkeypatch, which, step):
    """Between manifest and weights the checkpoint is replaced by one of the same step, or makes way for another."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    read_manifest = checkpoints.read_manifest

    def save(step, value):
        store.save(step, Contents({"w": torch.full((2, 3), value)}, {} if which == "last" else None))

    def interrupted(folder):
        manifest = read_manifest(folder)
        monkeypatch.setattr(checkpoints, "read_manifest", read_manifest)
        save(step, 2.0)
        return manifest

    save(1, 1.0)
    monkeypatch.setattr(checkpoints, "read_manifest", interrupted)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, 3))
    assert load_weights(model, tmp_path, which).step == step and bool((model.w == 2.0).all())
    assert [path.name for path in store.folder.iterdir()] == [f"{'step' if which == 'last' else 'best'}-{step:08d}"]


def test_shared_and_overlapping_tensors(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    base = torch.arange(12.0)
    views = {"row": base[:4], "transposed": base.view(3, 4).T, "empty": torch.zeros(0), "also": torch.zeros(0)}
    folder = CheckpointStore(tmp_path).save(1, Contents(weights_of(model) | views, None))
    _, found = read(folder)
    assert torch.equal(found.weights["0.weight"], model[0].weight)
    assert torch.equal(found.weights["1.weight"], model[0].weight)
    for name, view in views.items():
        assert torch.equal(found.weights[name], view)
    entry = json.loads((folder / "manifest.json").read_text())["files"]["weights.safetensors"]
    assert entry["aliases"] == {"1.weight": "0.weight"} and entry["bytes"] < 600


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(3, contents(1.0))
    full_disk(monkeypatch, lambda path: path.name == "training.pt")
    with pytest.raises(OSError, match="No space left"):
        store.save(6, contents(2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert store.newest()[0].step == 3


def test_training_goes_on_over_a_full_disk(tmp_path, monkeypatch):
    run(tmp_path / "never full")
    console = quiet()
    full_disk(monkeypatch, lambda path: "step-00000006" in str(path) or "best-00000008" in str(path))
    assert run(tmp_path / "full", console=console).finished
    printed = console.file.getvalue()
    assert "warning: the checkpoint of step 6 could not be written (No space left on device)" in printed
    assert "step-00000003" in printed and "training continues" in printed
    assert losses(tmp_path / "full") == losses(tmp_path / "never full")
    assert [r["step"] for r in read_log(tmp_path / "full" / "log.jsonl") if r.get("event") == "checkpoint failed"]


def test_a_disk_that_is_full_at_the_end(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"last good one is .*step-00000009"):
        full_disk(patch, lambda path: "step-00000012" in str(path))
        run(tmp_path)
    assert run(tmp_path).finished


def test_a_log_that_cannot_be_written_does_not_stop_training(tmp_path, monkeypatch):
    from fastweights.training.runs.log import JsonLines

    def full(self, record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(JsonLines, "write", full)
    console = quiet()
    assert run(tmp_path, console=console).finished
    assert console.file.getvalue().count("JsonLines cannot be written") == 1


def test_a_run_goes_on_before_its_damaged_checkpoint(tmp_path):
    run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    damage(tmp_path / "damaged" / "checkpoints" / "step-00000012" / "weights.safetensors", "flipped")
    console = quiet()
    assert run(tmp_path / "damaged", console=console).finished
    assert "checksum" in console.file.getvalue() and "resuming from step 9" in console.file.getvalue()
    assert losses(tmp_path / "damaged") == losses(tmp_path / "whole")


def test_weights_for_use(tmp_path):
    run(tmp_path, eval_every=None)
    model = TinyTask().build()
    assert load_weights(model, tmp_path, "last").step == 12
    assert model.head.weight is model.embedding.weight
    with pytest.raises(ValueError, match="which must be 'best' or 'last'"):
        load_weights(model, tmp_path, "first")


def test_carried_values_survive_packing():
    state = FastWeightState(W=torch.randn(2, 3, requires_grad=True))
    value = {"a": [state, None], "b": (1, 2.5, "c"), "d": LossOutcome(torch.ones(()), {"tokens": 3})}
    packed = pack(value)
    found = unpack(packed, CPU)
    assert isinstance(found["a"][0], FastWeightState) and torch.equal(found["a"][0].W, state.W)
    assert not found["a"][0].W.requires_grad and found["a"][0].z is None
    assert found["b"] == (1, 2.5, "c") and isinstance(found["d"], LossOutcome)
    assert map_tensors(lambda t: t + 1, value)["d"].loss == 2
    with pytest.raises(TypeError, match="cannot save a object"):
        pack({"x": object()})


def test_a_checkpoint_cannot_call_what_it_likes():
    with pytest.raises(ValueError, match="neither a dataclass nor a named tuple"):
        unpack({"__kind__": "os:system", "fields": {"command": "true"}}, CPU)


def test_the_generator_of_a_gpu_is_set_where_there_is_one_and_its_state_was_kept(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: seen.append((state, device)))
    cpu, gpu, state = torch.device("cpu"), torch.device("cuda", 1), torch.arange(3)
    kept = snapshot.generators(cpu)
    assert "cuda" not in kept
    snapshot.restore_generators(kept, gpu)
    snapshot.restore_generators({**kept, "cuda": state}, cpu)
    assert not seen
    snapshot.restore_generators({**kept, "cuda": state}, gpu)
    assert seen == [(state, gpu)]
