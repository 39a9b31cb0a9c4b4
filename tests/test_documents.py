"""Documents: lines that fit a screen, links and paths that lead somewhere."""

import re
from pathlib import Path

import pytest

import fastweights as fw
from fastweights.layers.fast_weight import NORMALIZATIONS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@documents
def test_lines_fit_a_screen(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    # Rows of tables and links cannot be broken.
    long = [number for number, line in lines if len(line) > 120 and not line.startswith("|") and "](" not in line]
    assert not long


@documents
def test_links_lead_to_files(path):
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    assert not [target for target in targets if "://" not in target and not (path.parent / target).exists()]


@documents
def test_files_that_are_named_exist(path):
    text = path.read_text()
    named = re.findall(r"\b(?:docs|tests|examples|results)/[\w./*-]*[\w*]", text)
    named += [f"results/bench/{name}" for name in re.findall(r"[\w*-]+-(?:h200|cpu)\.json", text)]
    named += [
        f"src/fastweights/{name}"
        for name in re.findall(r"`((?:\w+/)+[\w*]+\.py)`", text)
        if name.split("/")[0] not in ("tests", "examples")
    ]
    assert not [name for name in named if not any(ROOT.glob(name))]


@pytest.mark.parametrize("name", ["README.md", "docs/quick-start.md"])
def test_every_rule_map_and_normalisation_is_named(name):
    text = (ROOT / name).read_text()
    names = [*fw.list_rules(), *fw.list_feature_maps(), *NORMALIZATIONS]
    assert [name for name in names if f"`{name}`" not in text] == []
