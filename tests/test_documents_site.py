"""The documentation as a site: it builds without a warning and without the network, and its reference is complete."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import typer

import fastweights as fw
from fastweights.cli import COMMANDS, app

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built in strict mode: a warning is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_the_documentation_is_built(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    built = [page.with_suffix(".html") if page.name != "README.md" else page.parent / "index.html" for page in pages]
    assert [page for page in built if not (site / page).is_file()] == []


def test_no_page_asks_another_server_for_anything(site):
    asked = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="?(https?:[^">\s]+)')
    found = {url for page in site.rglob("*.html") for url in asked.findall(page.read_text())}
    assert not found


def test_every_public_name_is_in_the_reference(site):
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    anchors = {name.rpartition(".")[2] for name in re.findall(r'<h2 id="(fastweights\.[\w.]+)"', text)}
    assert {*fw.__all__, *fw.probe.__all__} - {"__version__", "probe"} <= anchors


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_in_the_reference(site, name):
    page = (site / "command-line.html").read_text()
    (section,) = re.findall(rf'<h2 id="fastweights-{name.replace(" ", "-")}">(.*?)(?=<h2|</article>)', page, re.DOTALL)
    command = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    for option in command.load().params:
        written = (
            ", ".join(option.opts) if option.param_type_name == "option" else option.metavar or option.name.upper()
        )
        assert f"<code>{written}</code>" in unescape(section)
