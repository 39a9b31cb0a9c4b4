"""Benchmarks measure the same function for every rival, and write down what they measured."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fastweights.benchmarks import lm, memory, retrieval, translation
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


SHORT = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 8, "segment": 6, "batch_size": 2}


def test_lm_compares_and_writes_what_it_measured(tmp_path, monkeypatch):
    make = lm.make
    monkeypatch.setattr(lm, "make", lambda *arguments, **changes: make(*arguments, **{**SHORT, **changes}))
    out = tmp_path / "lm.json"
    options = ["--sizes", "tiny", "--models", "delta,transformer", "--ways", "plain,bf16,fast", "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "lm", "--out", str(out), "--steps", "1", "--compared", "2", *options])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["size"], row["model"], row["data"]) for row in rows] == [
        ("tiny", "delta", "zipf"),
        ("tiny", "transformer", "zipf"),
    ]
    for row in rows:
        assert row["plain"]["words_per_s"] == pytest.approx(12 / (1e-3 * row["plain"]["step_ms"]))
        # A failure is recorded beside what did not fail, and is one of the whole.
        assert "CUDA graph needs a CUDA device" in row["fast"]["failure"]
        assert "CUDA graph needs a CUDA device" in row["agreement"]["failure"]
    assert result.exit_code == 1
    assert "plain" in result.output and "bf16" in result.output


def test_lm_ways_learn_the_same(monkeypatch):
    corpus = lm.random_corpus("tiny")
    make = lm.make
    monkeypatch.setattr(lm, "make", lambda *arguments, **changes: make(*arguments, **{**SHORT, **changes}))
    found = lm.agreement(corpus, "tiny", "delta", ["plain", "bf16"], "cpu", 3)
    assert found["agree"] and 0 < found["largest_difference"]["bf16"] < lm.AGREEMENT
    assert len(set(found["losses"]["plain"])) == 3


def test_lm_refuses_unknown_names():
    result = CliRunner().invoke(app, ["bench", "lm", "--models", "detla", "--device", "cpu"])
    assert result.exit_code == 2 and "unknown model 'detla'" in result.output


def test_random_words_are_as_frequent_as_in_text():
    words = lm.zipf(267_735, 200_000)
    counts = torch.bucketize(words, torch.tensor([20_000, 40_000, 200_000]), right=True).bincount(minlength=4)
    shares = counts / len(words)
    torch.testing.assert_close(shares, torch.tensor([0.934, 0.031, 0.032, 0.003]), atol=0.01, rtol=0)
