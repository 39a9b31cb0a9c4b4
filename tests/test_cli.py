"""The commands that report on the library and the machine."""

import json

import pytest
from typer.testing import CliRunner

import fastweights as fw
from fastweights.benchmarks import memory
from fastweights.cli import app
from fastweights.commands.tour import overwrite


def run(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)


def test_version():
    assert run("--version").output.strip() == f"fastweights {fw.__version__}"


def test_info_names_every_entry_of_the_tables():
    result = run("info")
    assert result.exit_code == 0
    for table in (fw.list_rules(), fw.list_feature_maps(), fw.list_backends()):
        assert all(name in result.output for name in table)


def test_tour_shows_every_rule():
    result = run("tour")
    assert result.exit_code == 0
    assert all(rule in result.output for rule in fw.list_rules())


def test_overwriting_tells_the_rules_apart():
    assert overwrite("delta", 1.0) == pytest.approx((0, 0), abs=1e-12)
    assert overwrite("sum", 1.0) == pytest.approx((1, 0), abs=1e-12)
    assert overwrite("gated", 1.0) == pytest.approx((0, 1), abs=1e-12)
    assert overwrite("gated", 0.5)[1] == pytest.approx(0.5)


def test_bench_memory_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHAPES", [(1, 8, 1, 4)])
    monkeypatch.setattr(memory, "GROWTH", [])
    out = tmp_path / "folder" / "memory.json"
    assert run("bench", "memory", "--repeats", "1", "--out", str(out)).exit_code == 0
    record = json.loads(out.read_text())
    assert [row["rival"] for row in record["rows"]] == list(memory.RIVALS)
    assert all(row["forward_backward"] > 0 for row in record["rows"])
    assert {"commit", "hardware", "versions", "seed", "wall_s"} <= set(record)


def test_the_rivals_compute_the_same():
    import torch

    q, k, v, beta = (torch.rand(2, 20, 2, 4, dtype=torch.float64) for _ in range(4))
    outputs = [rival(q, k / k.sum(-1, keepdim=True), v, beta[..., 0]) for rival in memory.RIVALS.values()]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])
