"""Declaring the source of a number, and the files that most are from."""

import json

import torch

import fastweights as fw
from fastweights.models import presets
from tests.numbers.text import ROOT

SOURCES = {}


def source(document, beginning):
    """Declare where the numbers of the block that begins so are from."""

    def declare(values):
        SOURCES[document, beginning] = values
        return values

    return declare


def rows(name):
    """Return the measurements of `results/bench/NAME.json`."""
    return json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())["rows"]


def row(name, /, **fields):
    """Return the only row of `results/bench/NAME.json` that has these fields."""
    (found,) = [row for row in rows(name) if fields.items() <= row.items()]
    return found


def cells(experiment):
    """Return every trained model of an experiment, configuration and metrics."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / experiment / "cells").glob("*.json"))]


def count_code(path):
    """Count the lines below the docstring that are not empty."""
    return sum(bool(line.strip()) for line in (ROOT / path).read_text().split('"""', 2)[2].splitlines())


def parameters(preset):
    """Count the parameters of a preset, without their memory."""
    with torch.device("meta"):
        return fw.LanguageModel(presets.PRESETS[preset]()).n_parameters
