"""The commands that report on the library and the machine."""

import pytest
from typer.testing import CliRunner

import fastweights as fw
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
