"""The command line as a whole: help, completion, JSON, missing packages; and the commands about the library."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import fastweights as fw
from fastweights.benchmarks import retrieval
from fastweights.cli import COMMANDS, app
from fastweights.commands.options import EXTRAS
from fastweights.commands.tour import overwrite
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import SCALES


def run(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)


def test_version():
    assert run("--version").output.strip() == f"fastweights {fw.__version__}"


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "fastweights", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == f"fastweights {fw.__version__}" and done.returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_has_help_without_paths_of_the_source(command, option):
    result = run(*command.split(), option)
    assert result.exit_code == 0, result.output
    assert f"fastweights {command}" in result.output
    assert ".py" not in result.output and "models/" not in result.output


def test_help_lists_every_command():
    for group in ("", "train", "eval", "export", "bench"):
        listed = run(*group.split(), "-h").output
        for path in COMMANDS:
            *parents, name = path.split()
            if parents == group.split():
                assert f"│ {name} " in listed, path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("fastweights tra", {"train", "translate"}), ("fastweights bench lm", {"lm", "lm-agreement"})],
)
def test_completion(typed, expected):
    environment = {"_FASTWEIGHTS_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    result = CliRunner(env=environment).invoke(app, [], prog_name="fastweights")
    assert set(result.stdout.split()) == expected
    assert "--install-completion" in run("-h").output


def test_completion_of_options():
    environment = {"_FASTWEIGHTS_COMPLETE": "complete_bash", "COMP_WORDS": "fastweights tour --", "COMP_CWORD": "2"}
    assert CliRunner(env=environment).invoke(app, [], prog_name="fastweights").stdout.split() == ["--help"]


WITHOUT_EXTRAS = {
    "train lm --preset tiny": "train",
    "train mt --preset tiny": "train,mt",
    "eval mt RUN": "mt",
    "data wikitext103": "data",
    "data numbers": "mt",
    "bench lm --device cpu": "train",
    "bench lm-agreement --corpus DIR --device cpu": "train",
    "reproduce fig2": "experiments",
    "reproduce table2": "experiments,train",
    "report": "experiments",
}


@pytest.mark.parametrize("command", WITHOUT_EXTRAS)
def test_a_missing_extra_is_named_before_anything_else(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in EXTRAS:
        monkeypatch.setitem(sys.modules, package, None)
    result = run(*command.split())
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("Error: this needs ") and len(result.stderr.splitlines()) == 1
    assert f"pip install 'fastweights[{WITHOUT_EXTRAS[command]}]'" in result.stderr
    assert not list(tmp_path.iterdir())


def test_every_command_can_be_imported_without_extras():
    code = f"""
import sys
for package in {[*EXTRAS, "triton", "tensorboard"]}:
    sys.modules[package] = None
from importlib import import_module
from fastweights.cli import COMMANDS
for target, _ in COMMANDS.values():
    module, function = target.split(":")
    assert callable(getattr(import_module("fastweights." + module), function))
"""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=one_thread)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
@pytest.mark.parametrize("command", ["bench lm", "bench lm-agreement --corpus nowhere"])
def test_a_benchmark_says_that_it_needs_a_gpu(command):
    result = run(*command.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert "needs a CUDA device" in result.stderr and "--device cpu" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_benchmarks_print_json_alone_on_standard_output(monkeypatch):
    monkeypatch.setattr(retrieval, "CELLS", [(1, "dpfp-1", 4)])
    result = run("bench", "retrieval", "--repeats", "1", "--json")
    record = json.loads(result.stdout)
    assert record["benchmark"] == "retrieval" and record["rows"][0]["form"] == "plain"
    assert "measuring dpfp-1" in result.stderr and "ms a step" in result.stderr


def test_info_names_every_entry_of_the_tables():
    result = run("info")
    assert result.exit_code == 0
    for table in (fw.list_rules(), fw.list_feature_maps(), fw.list_backends()):
        assert all(name in result.output for name in table)


def test_info_as_json(monkeypatch):
    facts = json.loads(run("info", "--json").stdout)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["feature_maps"] == fw.list_feature_maps()
    assert set(facts["rules"]) == set(fw.list_rules()) and facts["rules"]["delta"]["gates"] == ["beta"]
    assert facts["backends"]["reference"] | {"description": ""} == {"usable": True, "reason": None, "description": ""}
    library = ("C++ library: level ",) if facts["backends"]["cpu"]["usable"] else ()
    assert all(words in facts["devices"]["cpu"] for words in ("thread", *library))
    both = run("info", "--json", "--check")
    assert both.exit_code == 2 and "leave --json out" in both.stderr
    monkeypatch.setenv("FASTWEIGHTS_CPU_LEVEL", "avx1024")
    unknown = run("info", "--json")
    assert unknown.exit_code == 2 and "FASTWEIGHTS_CPU_LEVEL must be one of" in unknown.stderr


def test_tour_shows_every_rule():
    result = run("tour")
    assert result.exit_code == 0
    assert all(rule in result.output for rule in fw.list_rules())


def test_overwriting_tells_the_rules_apart():
    assert overwrite("delta", 1.0) == pytest.approx((0, 0), abs=1e-12)
    assert overwrite("sum", 1.0) == pytest.approx((1, 0), abs=1e-12)
    assert overwrite("gated", 1.0) == pytest.approx((0, 1), abs=1e-12)
    assert overwrite("gated", 0.5)[1] == pytest.approx(0.5)


def test_the_list_of_experiments_as_json(tmp_path):
    listed = json.loads(run("reproduce", "--list", "--json", "--out", str(tmp_path)).stdout)
    assert [row["name"] for row in listed] == list(EXPERIMENTS)
    assert listed[0] | {"scales": {}} == {
        "name": "fig1",
        "title": EXPERIMENTS["fig1"].title,
        "where": EXPERIMENTS["fig1"].where,
        "scales": {},
        "results": None,
    }
    assert all(set(SCALES) <= set(row["scales"]) and row["scales"]["small"]["cells"] > 0 for row in listed)
    assert all(set(row["scales"]) == set(EXPERIMENTS[row["name"]].scales) for row in listed)
    alone = run("reproduce", "fig1", "--json", "--out", str(tmp_path))
    assert alone.exit_code == 2 and "--json is for --list" in alone.stderr
