"""Write the page of commands from the commands themselves; `mkdocs.yml` calls this for every page."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fastweights.cli import COMMANDS, LazyCommand, app

PLACE = "<!-- commands -->"
RESULTS = Path(__file__).parents[1] / "results"
# Results that pages show or link to, and that the site therefore has, too.
SHOWN = ("look/demo.html", "look/demo.png", "bench/stream-cpu.png")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results that pages show."""
    for name in SHOWN:
        files.append(File.generated(config, f"results/{name}", abs_src_path=str(RESULTS / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the reference of all commands in its place, and lead links to results to the site's own copies."""
    markdown = markdown.replace("](../results/", "](results/")
    return markdown.replace(PLACE, "\n".join(_reference())) if PLACE in markdown else markdown


def _reference() -> Iterator[str]:
    for name in COMMANDS:
        command = _command(name)
        arguments = [option for option in command.params if option.param_type_name == "argument"]
        usage = " ".join(option.metavar or option.name.upper() for option in arguments)
        yield f"\n## fastweights {name}\n\n{escape(command.help)}\n"
        yield f"```text\nfastweights {name} [OPTIONS] {usage}".rstrip() + "\n```\n"
        yield "| option | default | meaning |\n|---|---|---|"
        for option in command.params:
            label = option.metavar or option.name.upper() if option in arguments else ", ".join(option.opts)
            yield f"| `{label}` | {_cell(_default(option))} | {_cell(option.help or '')} |"


def _command(name: str) -> Any:
    command: Any = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    assert isinstance(command, LazyCommand)
    return command.load()


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    return "" if option.default in (None, False, ()) or not option.show_default else str(option.default)


def _cell(text: str) -> str:
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")
