"""Benchmarks measure the same function for every rival, and write down what they measured."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fastweights.benchmarks import memory, retrieval, translation
from fastweights.cli import app
from fastweights.data.synthetic import training_batches
from fastweights.training.retrieval import Cell, RetrievalConfig


def record_of(tmp_path, name, *options):
    out = tmp_path / "folder" / f"{name}.json"
    result = CliRunner().invoke(app, ["bench", name, "--repeats", "1", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert {"commit", "hardware", "versions", "seed", "wall_s", "threads"} <= set(record)
    return record


def test_memory_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHAPES", [(1, 8, 1, 4)])
    monkeypatch.setattr(memory, "GROWTH", [])
    rows = record_of(tmp_path, "memory")["rows"]
    assert [row["rival"] for row in rows] == list(memory.RIVALS)
    assert all(row["forward_backward"] > 0 for row in rows)


def test_retrieval_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "CELLS", [(1, "dpfp-1", 4)])
    rows = record_of(tmp_path, "retrieval")["rows"]
    assert [row["form"] for row in rows] == ["plain", "tables", "ours"]
    assert rows[0]["gain"] == 1


def test_translation_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "LENGTHS", (4, 64))
    monkeypatch.setattr(translation, "SIZES", {"cpu": (16, 2)})
    monkeypatch.setattr(translation, "NEW", 3)
    rows = record_of(tmp_path, "mt", "--preset", "tiny", "--device", "cpu")["rows"]
    assert [(row["source_length"], row["attention"]) for row in rows] == [
        (length, attention) for length in (4, 64) for attention in ("softmax", "linear")
    ]
    assert all(row[name] > 0 for row in rows for name in ("train_tokens_per_s", "encode_ms", "step_ms"))
    bytes_of = {(row["source_length"], row["attention"]): row["state_bytes"] for row in rows}
    assert bytes_of[4, "linear"] == bytes_of[64, "linear"] and bytes_of[64, "softmax"] > bytes_of[4, "softmax"]


def test_the_memory_rivals_compute_the_same():
    q, k, v, beta = (torch.rand(2, 20, 2, 4, dtype=torch.float64) for _ in range(4))
    outputs = [rival(q, k / k.sum(-1, keepdim=True), v, beta[..., 0]) for rival in memory.RIVALS.values()]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])


@pytest.mark.parametrize(("setting", "model"), [(1, "dpfp-2"), (1, "linear"), (2, "dpfp-1-delta"), (2, "schlag2021")])
def test_the_retrieval_forms_compute_the_same(setting, model):
    cell = Cell(RetrievalConfig(setting=setting, model=model, size=9), dtype=torch.float64)
    (batch,) = training_batches(setting, 9, 1, 3, torch.Generator().manual_seed(0))
    losses = [form(cell.model, batch) for form in retrieval.forms(cell.config.entry.rule).values()]
    gradients = [torch.autograd.grad(loss, cell.parameters) for loss in losses]
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0])
        torch.testing.assert_close(gradient, gradients[0])
