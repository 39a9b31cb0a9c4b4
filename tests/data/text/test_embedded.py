"""The corpus that comes with Python."""

import hashlib
import os
import platform
import subprocess
import sys

import pytest

from fastweights.data.prepare import prepare
from fastweights.data.text import embedded


@pytest.fixture(scope="module")
def corpus(embedded_corpus):
    return embedded_corpus


def test_a_few_hundred_thousand_tokens(corpus):
    assert 200_000 < len(corpus.train) < 2_000_000
    assert min(len(corpus.valid), len(corpus.test)) > 5_000
    assert 3_000 < corpus.tokenizer.size < 30_000
    assert corpus.manifest["versions"]["python"] == platform.python_version()
    assert corpus.manifest["official"] is False
    for split in corpus.manifest["splits"].values():
        assert split["unknown"] < 0.08 * split["tokens"]


def test_it_is_english_in_lines(corpus):
    text = corpus.tokenizer.decode(corpus.train.tokens.tolist())
    assert text.startswith("= ") and "\n\n" in text
    assert text.count(" the ") > 5_000 and " a function " in text


def test_one_python_gives_one_text(monkeypatch):
    modules = ["asyncio", "no_such_module", "json", "textwrap"]
    monkeypatch.setattr(embedded, "MODULES", modules)
    here = repr(embedded.texts(lambda stage, fraction: None))
    code = (
        f"import hashlib; from fastweights.data.text import embedded; embedded.MODULES = {modules}\n"
        "text = repr(embedded.texts(lambda stage, fraction: None))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    # Neither the order of sets nor docstrings stripped at run time may show.
    command, environment = [sys.executable, "-OO", "-c", code], os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()


@pytest.mark.parametrize("split", ["valid", "test"])
def test_documents_are_held_out_whole(corpus, split):
    def titles(name):
        lines = corpus.tokenizer.decode(corpus.split(name).tokens.tolist()).split("\n")
        # A rare word in a title reads <unk>, and then titles can look alike.
        return {line for line in lines if line.startswith("= ") and line.endswith(" =") and "<unk>" not in line}

    assert len(titles(split)) > 5 and not titles("train") & titles(split)


def test_nothing_is_imported():
    code = (
        "import sys; from fastweights.data.text import embedded; embedded.MODULES = ['turtle', 'webbrowser', 'venv']\n"
        "before = set(sys.modules); embedded.texts(lambda stage, fraction: None)\n"
        "print(*(name for name in set(sys.modules) - before if not name.startswith('_sysconfigdata')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == {"pydoc_data", "pydoc_data.topics"}


def test_without_sources(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr(embedded, "MODULES", ["no_such_module"])
    with pytest.raises(ValueError, match="carries no documentation"):
        prepare("embedded", None, tmp_path)
