"""Every Python block and every command in README, CONTRIBUTING and the documentation, run as a reader would.

The blocks of a document run one after another in one folder, so a command may use what an earlier one made. A comment
above a block of commands says where the test does otherwise:

    <!-- test: options only -->        parsed by the command's own parser and not run: it needs data, a GPU or hours
    <!-- test: with --steps 2 -->      run with these options added to `fastweights train` or `fastweights reproduce`

Blocks in the language `text` are not commands. The diary is not run: it tells of commands of its day.
"""

import re
import shlex
import subprocess
import tomllib
from itertools import islice
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from fastweights.cli import app
from fastweights.commands.options import read_settings
from fastweights.data.registry import CORPORA
from fastweights.data.text import embedded
from fastweights.experiments import EXPERIMENTS
from fastweights.feature_maps import FEATURE_MAPS
from fastweights.models.presets import MIXER_CHOICES, PRESETS
from fastweights.models.translation_config import ATTENTIONS
from fastweights.models.translation_presets import PRESETS as MT_PRESETS
from fastweights.ops.backends import BACKENDS, EXECUTABLES
from fastweights.ops.rules import RULES
from fastweights.training.tasks.language import FIELDS as LM_FIELDS
from fastweights.training.tasks.translation import FIELDS as MT_FIELDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
DOCUMENTS = [path for path in DOCUMENTS if "log" not in path.parent.name]
FENCE = re.compile(r"(?:<!-- test: (?P<how>.*?) -->\n+)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.M)
NOT_RUN = {"text", "bibtex", "toml", "yaml", "json"}
NAMES = {
    "data": {"kind": CORPORA},
    "train lm": {"preset": PRESETS, "mixer": MIXER_CHOICES, "rule": RULES},
    "train mt": {"preset": MT_PRESETS, "attention": ATTENTIONS, "rule": RULES},
    "reproduce": {
        "names": {*EXPERIMENTS, "all"},
        "scale": {scale for experiment in EXPERIMENTS.values() for scale in experiment.scales},
    },
}

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Corpora that commands prepare on first use, once for all documents; of Python's documentation the beginning."""
    documents = embedded._documents
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "_documents", lambda: islice(documents(), 40))
        yield tmp_path_factory.mktemp("data")


@pytest.fixture
def folder(tmp_path, data):
    """An empty folder to work in, but for the corpora."""
    (tmp_path / "data").symlink_to(data)
    return tmp_path


@pytest.fixture
def registered():
    """Whatever a document registers is forgotten after it."""
    tables = [(table, dict(table)) for table in (RULES, FEATURE_MAPS, BACKENDS, EXECUTABLES, EXPERIMENTS)]
    yield
    for table, content in tables:
        table.clear()
        table.update(content)


@documents
def test_blocks_run(path, folder, registered, monkeypatch):
    monkeypatch.chdir(folder)
    torch.use_deterministic_algorithms(False)
    namespace = {"__name__": "document"}
    for block in FENCE.finditer(path.read_text()):
        how, language, code = block["how"], block["language"], block["code"]
        if language == "python":
            assert how is None, "Python blocks are run as they are"
            exec(compile(code, str(path), "exec"), namespace)
        elif language == "sh":
            for line in code.replace("\\\n", " ").splitlines():
                run_line(line, how)
        elif language == "bash":
            run_script(code, folder)
        else:
            assert language in NOT_RUN, f"{path.name} has a block in the language {language!r}"


def run_line(line, how):
    """Run or check one line of a shell session."""
    words, given, target = shlex.split(line, comments=True), None, None
    if ">" in words:
        *words, _, target = words
    if "<" in words:
        *words, _, source = words
        given = Path(source).read_text()
    if "|" in words:
        bar = words.index("|")
        assert words[0] == "echo", f"only echo may be piped, in {line!r}"
        given, words = " ".join(words[1:bar]) + "\n", words[bar + 1 :]
    if not words:
        return
    output = run_command(words, how, given)
    if target is not None:
        Path(target).write_text(output)


def run_command(words, how, given=None):
    """Run a command, or check what can be known of it without running it; anything else is an error."""
    program, *arguments = words
    if program == "echo":
        return " ".join(arguments) + "\n"
    if program in ("python", "torchrun") and "fastweights" in arguments:
        check_options(arguments[arguments.index("fastweights") + 1 :])
    elif program in ("python", "torchrun"):
        (script,) = [word for word in arguments if word.endswith(".py")]
        assert script.startswith("examples/") and (ROOT / script).is_file()  # run by tests/test_examples.py
    elif program == "fastweights":
        return run_fastweights(arguments, how, given)
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"\[(.*?)\]", " ".join(arguments))
        assert arguments[0] == "install" and {extra for names in named for extra in names.split(",")} <= set(extras)
    elif program.endswith("/pytest"):
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))
    else:
        assert program in ("rsync", "sbatch") and how == "options only", f"cannot test the command {words}"
    return ""


def run_fastweights(arguments, how, given):
    check_options(arguments)
    if how == "options only":
        return ""
    added = shlex.split(how.removeprefix("with ")) if how and arguments[0] in ("train", "reproduce") else []
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, *added], input=given)
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.stdout


def check_options(arguments):
    """Parse the arguments as the command does, and look up the names that it would look up later."""
    command = typer.main.get_command(app)
    name, rest = [], list(arguments)
    while rest and rest[0] in getattr(command, "commands", ()):
        name.append(rest.pop(0))
        command = command.commands[name[-1]]
    if not name:
        assert rest and {*rest} <= {"--help", "-h", "--version", "--install-completion"}
        return
    context = command.make_context(" ".join(name), rest)
    for option, known in NAMES.get(" ".join(name), {}).items():
        values = context.params[option]
        for value in values if isinstance(values, list | tuple) else [values]:
            assert value is None or value in known, (arguments, value)
    check_settings(name, context.params)


def check_settings(name, options):
    """Read the fields and values of --set as the command does."""
    given = options.get("settings") or []
    if name[0] == "reproduce":
        takers = [EXPERIMENTS[name].fields for name in options["names"] or () if name != "all"]
        takers = [fields for fields in takers if fields]
        assert takers or not given, "no experiment that takes --set is named"
    else:
        takers = [LM_FIELDS if name == ["train", "lm"] else MT_FIELDS]
    for fields in takers:
        fields.sort(read_settings(fields, given, {}))


def run_script(code, folder):
    """Run a script of bash with commands that only write down how they were called, then check those calls."""
    calls, programs = folder / "calls", folder / "programs"
    programs.mkdir(exist_ok=True)
    calls.unlink(missing_ok=True)
    for name in ("fastweights", "torchrun", "srun", "scontrol"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%q " {name} "$@" >> {calls}; echo >> {calls}\n')
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True, env=environment, cwd=folder)
    for line in calls.read_text().splitlines():
        words = shlex.split(line)
        assert "fastweights" in words, line
        check_options(words[words.index("fastweights") + 1 :])


@documents
def test_settings_in_sentences_exist(path):
    for setting in re.findall(r"`--set ([a-z]\w*=[^`\s]+)`", path.read_text()):
        fields = MT_FIELDS if path.name == "translation.md" else LM_FIELDS
        fields.sort(read_settings(fields, [setting], {}))


@pytest.mark.parametrize(
    "line",
    [
        "fastweights train lm --preset gigantic",
        "fastweights reproduce fig99",
        "fastweights --loud",
        "make love",
        "pip install '.[everything]'",
        "rm -rf results",
        "python examples/nothing.py",
    ],
)
def test_wrong_commands_are_seen(line):
    with pytest.raises(AssertionError):
        run_line(line, "options only")


def test_wrong_settings_are_seen():
    for command in ("train lm", "train mt", "reproduce table2", "reproduce table1"):
        run_line(f"fastweights {command} --set precision=bf16-mixed", "options only")
        with pytest.raises(ValueError, match="unknown field 'prezision'"):
            run_line(f"fastweights {command} --set prezision=bf16-mixed", "options only")


def test_wrong_options_are_seen():
    with pytest.raises(Exception, match="No such option: --presett"):
        run_line("fastweights train lm --presett tiny", "options only")
