"""Examples: each runs as it is written, and shows what it says."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastweights.feature_maps import FEATURE_MAPS
from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.ops.backends import BACKENDS, EXECUTABLES
from fastweights.ops.rules import RULES
from tests.training.small_text import random_model

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example with arguments in this process, forget what it registers, and return what it prints."""
    tables = [(table, dict(table)) for table in (RULES, FEATURE_MAPS, BACKENDS, EXECUTABLES)]
    torch.use_deterministic_algorithms(False)

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield call
    for table, content in tables:
        table.clear()
        table.update(content)


def losses(output):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_every_example_is_tested():
    tested = set(re.findall(r"\"(\w+\.py)\"", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.iterdir()} == tested


def test_only_the_delta_rule_learns_to_overwrite(run):
    share = {rule: int(right) for rule, right in re.findall(r"(\w+) rule: (\d+)%", run("minimal_layer.py"))}
    assert share["delta"] > 90 and share["sum"] < 60


def test_onnx_runtime_continues_as_pytorch_does(run):
    found = [int(token) for token in re.findall(r"\d+", run("onnx_runtime.py"))]
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2, d_ff=32, rule="delta")
    model, state, text = LanguageModel(config).eval(), None, [3, 14, 15, 9, 26]
    for i in range(14):
        log_probs, state = model.step(torch.tensor(text[i : i + 1]), state)
        text += [int(log_probs.argmax())] if i >= 4 else []
    assert found == text[5:]


def test_a_kernel_is_judged(run):
    verdicts = dict(line.split(": ", 1) for line in run("judge_a_kernel.py").splitlines())
    assert [verdict.split(" there")[0].strip() for verdict in verdicts.values()] == [
        "right",
        "right",
        "right",
        "wrong",
        "not supported",
    ]


def test_a_character_model_learns(run, tmp_path):
    (tmp_path / "text").write_text("abcdefgh" * 300)
    output = run("character_model.py", tmp_path / "text", 25)
    assert losses(output)[-1] < 0.5 and "abcdefgh" in output


def test_the_training_loop_of_the_examples_learns(run, tmp_path):
    (tmp_path / "text").write_text("abcdefgh" * 300)
    options = [tmp_path / "text", "--carried", "--batch", "4", "--length", "32", "--steps", "40"]
    output = run("train_language_model.py", *options)
    assert losses(output)[-1] < 0.1 and "abcdefghabcdefgh" in output


def test_a_stream_keeps_one_size(run):
    sizes = re.findall(r"state of (\d+) bytes", run("stream_forever.py"))
    assert len(sizes) == 3 and len(set(sizes)) == 1


def test_a_memory_is_looked_into_and_edited(run):
    output = run("memory_in_30_lines.py")
    last = dict(re.findall(r"(\w+) rule: .* ([\d.]+) for the last", output))
    edited = [float(error) for error in re.findall(r"second value, error (\S+)", output)]
    assert last["delta"] == "0.00" < last["sum"] and len(edited) == 2 and max(edited) < 1e-14


def test_a_trained_model_is_looked_into(run, tmp_path):
    output = run("look_inside.py", tmp_path / "page.html")
    assert "layer 3, head 5: most from token 2, ' film'" in output and output.count("layer") == 30
    assert (tmp_path / "page.html").stat().st_size > 100_000


def test_a_stream_is_rolled_back(run):
    output = run("roll_back.py")
    assert "snapshots at (0, 16)" in output and "8 of 15 tokens need not be read again" in output


def test_proposals_of_a_small_model_leave_the_text_as_it_is(run):
    calls, count = re.search(r"with (\d+) calls .* instead of (\d+)", run("speculative_decoding.py", 1, 12)).groups()
    assert int(calls) <= int(count) == 12
    example = runpy.run_path(str(EXAMPLES / "speculative_decoding.py"))
    large, other = random_model(), random_model(n_layers=1, init_std=1.0)
    expected = example["plain"](large, [1, 2, 3], 20)
    # A small model that is always right, and one that never knows.
    for small, most in ((large, 6), (other, 20)):
        text, calls = example["speculative"](large, small, [1, 2, 3], 20)
        assert text == expected and calls <= most


def test_gradients_of_every_sample(run):
    assert "project.weight: (6, 50, 16), one gradient per sample" in run("per_sample_gradients.py")


def test_a_rule_a_map_and_a_backend_from_outside(run):
    output = run("own_rule.py")
    differences = [float(number) for number in re.findall(r"differ\w* by (\S+)", output)]
    assert len(differences) >= 4 and max(differences) < 1e-14
    assert "backend mine:" in output


def test_two_processes_have_the_gradients_of_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "ddp.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 processes: gradients differ" in done.stdout
    assert float(re.search(r"one process by (\S+)", done.stdout).group(1)) < 1e-5


def test_gpt2_of_hugging_face_learns(run):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    first, *_, last = losses(run("huggingface_gpt2.py"))
    assert last < first < 5


def test_a_model_of_transformers_keeps_packed_documents_apart(run):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    output = run("transformers_patch.py")
    assert "torch_chunk_gated_delta_rule" in output
    assert float(re.search(r"packed and alone: (\S+)", output).group(1)) < 1e-6


def test_a_folder_of_hugging_face_is_read_by_transformers(run, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    assert "the same as without transformers: True" in run("huggingface_export.py", tmp_path)
