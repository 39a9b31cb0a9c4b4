"""What cannot be prepared is refused with the reason and a way out, and leaves nothing that looks finished."""

import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from fastweights.commands.data import data
from fastweights.data.manifest import DataError
from fastweights.data.prepare import prepare
from fastweights.data.registry import CORPORA
from fastweights.data.text.corpus import Corpus
from tests.data.corpora import write_wikitext, zipped
from tests.data.killed import killed

app = typer.Typer()
app.command()(data)


@pytest.fixture
def files(tmp_path):
    write_wikitext(tmp_path / "files")
    return tmp_path / "files"


def refused(tmp_path, message, kind, source, **options):
    with pytest.raises(ValueError, match=message):
        prepare(kind, source, tmp_path / "out", **options)
    with pytest.raises(DataError, match="there is no corpus"):
        Corpus.load(tmp_path / "out")


def test_missing_and_empty_files(files, tmp_path):
    where = "wikitext-103-v1"
    refused(tmp_path, f"there is no .*nowhere; .*{where}", "wikitext103", tmp_path / "nowhere")
    refused(tmp_path, f"not a zip archive.*{where}", "wikitext103", files / "wiki.train.tokens")
    (files / "wiki.test.tokens").rename(files / "wiki.text.tokens")
    refused(tmp_path, f"no wiki.test.tokens in .*, which holds .*wiki.text.tokens.*{where}", "wikitext103", files)
    (files / "wiki.test.tokens").touch()
    refused(tmp_path, f"wiki.test.tokens is empty; .*{where}", "wikitext103", files)
    (files / "wiki.test.tokens").write_text("\n")
    refused(tmp_path, "test has 1 tokens, too few", "wikitext103", files)
    refused(tmp_path, "no enwik8 in .*mattmahoney", "enwik8", files)
    refused(tmp_path, "there is no .txt file", "text", files)
    refused(tmp_path, "there is no file", "text", tmp_path / "nowhere")
    refused(tmp_path, "needs a --source", "text", None)
    refused(tmp_path, "has 0 files train", "ids", files)
    refused(tmp_path, "has no source", "embedded", files)
    refused(tmp_path, "unknown corpus 'wikitext'; did you mean", "wikitext", files)


def test_ambiguous_folders(files, tmp_path):
    write_wikitext(tmp_path / "second")
    refused(tmp_path, "more than once: ", "wikitext103", tmp_path)


def test_not_utf8(files, tmp_path):
    path = files / "wiki.valid.tokens"
    path.write_bytes("föö\nbär\n".encode() + b"a \xff b\n")
    refused(tmp_path, r"wiki.valid.tokens is not UTF-8: byte 13 \(0xff\), in line 3", "wikitext103", files)
    path.write_bytes("bär\nbä".encode()[:-1])
    refused(tmp_path, "byte 6 .*, in line 2: unexpected end of data; .* cut short", "wikitext103", files)


def test_truncated(files, tmp_path):
    archive = zipped(files, tmp_path / "whole.zip")
    content = archive.read_bytes()
    (tmp_path / "cut.zip").write_bytes(content[: len(content) // 2])
    refused(tmp_path, "is not a zip archive, or one that was cut short", "wikitext103", tmp_path / "cut.zip")
    with zipfile.ZipFile(archive) as opened:
        offset = next(info for info in opened.infolist() if info.filename.endswith("train.tokens")).header_offset + 90
    (tmp_path / "bad.zip").write_bytes(content[:offset] + bytes(40) + content[offset + 40 :])
    refused(tmp_path, "train.tokens in .*bad.zip is damaged", "wikitext103", tmp_path / "bad.zip")


def test_other_corpora_under_a_published_name(files, tmp_path):
    refused(
        tmp_path,
        r"not WikiText-103, or not all of it: \d+ in the vocabulary, not 267,735; "
        r"\d+ tokens in train, not 103,227,021; .*tokens in valid, not 217,646; .*--allow-other",
        "wikitext103",
        files,
    )
    refused(tmp_path, "not enwik8", "enwik8", files / "wiki.train.tokens")


def test_options(files, tmp_path):
    refused(tmp_path, "has no --min-count; those that have it: text, embedded", "wikitext2", files, min_count=2)
    refused(tmp_path, "--min-count must be at least 1", "embedded", None, min_count=0)
    refused(tmp_path, "both --valid and --test", "text", files / "wiki.train.tokens", valid=files / "wiki.valid.tokens")
    (tmp_path / "short").write_text("a\nb\n")
    refused(tmp_path, "lines in the text: 2, too few", "text", tmp_path / "short")


def test_finished_folders_are_not_taken_for_others(files, tmp_path):
    out = tmp_path / "out"
    prepare("wikitext2", files, out, allow_other=True)
    with pytest.raises(DataError, match=r"holds the corpus 'wikitext2', not 'wikitext103'.*--force"):
        prepare("wikitext103", files, out, allow_other=True)
    write_wikitext(tmp_path / "more", train=50)
    with pytest.raises(DataError, match="prepared from other files"):
        prepare("wikitext2", tmp_path / "more", out, allow_other=True)
    (files / "wiki.valid.tokens").unlink()
    with pytest.raises(DataError, match=r"no wiki.valid.tokens"):
        prepare("wikitext2", files, out, allow_other=True, force=True)
    assert Corpus.load(out, verify=True).manifest["name"] == "files"
    (out / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="not the manifest of a corpus"):
        prepare("wikitext2", files, out, allow_other=True)


def test_broken_ids(files, tmp_path):
    np = pytest.importorskip("numpy")
    (files / "vocab.txt").write_text("<eos>\na\n")
    path = files / "train.npy"
    np.save(path, np.array([0, 1, 2]))
    refused(tmp_path, r"holds the number 2; .* has words 0 … 1", "ids", files)
    np.save(path, np.array([[0, 1]]))
    refused(tmp_path, r"int64 of shape \(1, 2\)", "ids", files)
    path.write_bytes(path.read_bytes()[:-9])
    refused(tmp_path, "not a whole .npy file", "ids", files)
    np.save(path, np.array([0, 1, 1]))
    refused(tmp_path, "is not in the vocabulary of 2 words, which has no '<unk>'", "ids", files)
    (files / "vocab.txt").write_text("<eos>\na\na\n")
    refused(tmp_path, "'a' is in the vocabulary twice", "ids", files)


def test_an_out_that_cannot_be_written(files, tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(DataError, match="taken"):
        prepare("wikitext2", files, tmp_path / "taken", allow_other=True)
    assert (tmp_path / "taken").read_text() == "mine"


def test_fetching_off_line(tmp_path, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(tmp_path, r"fastweights\[data\].*wikitext-103-v1.zip", "wikitext103", None)

    def load_dataset(*names):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    refused(tmp_path, r"could not be fetched .*\(ConnectionError: no route\); give a folder", "wikitext103", None)


@pytest.mark.parametrize("before", ["nothing", "another"])
def test_killed_at_every_stage(files, tmp_path, before):
    out, whole = tmp_path / "out", tmp_path / "whole"
    prepare("wikitext2", files, whole, allow_other=True)
    new, old = Corpus.load(whole).fingerprint, None
    if before == "another":
        write_wikitext(tmp_path / "old", train=30)
        prepare("wikitext2", tmp_path / "old", out, allow_other=True)
        old = Corpus.load(out, verify=True).fingerprint
    seen, code = [], 9
    with killed("wikitext2", files, out, allow_other=True) as attempt:
        while code:
            code = attempt(len(seen))
            assert code in (0, 9)
            try:
                seen.append(Corpus.load(out, verify=True).fingerprint)
            except DataError:
                seen.append(None)
    # The old corpus until the files are moved, then none, then the new one; never a mixture.
    moved = seen.index(None) if old else 0
    assert seen == [old] * moved + [None] * (len(seen) - moved - 1) + [new] and len(seen) > 8
    assert not list(out.glob(".*"))


def run(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(argument) for argument in arguments])


def test_the_command(files, tmp_path):
    out = tmp_path / "out"
    arguments = ["wikitext2", "--source", files, "--out", out, "--allow-other"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "files, in the format of wikitext2 but not that corpus" in result.stdout
    assert "outside the vocabulary" in result.stdout and f"Written to {out}" in result.stdout
    assert "reading train" in result.stderr and "writing train" in result.stderr
    again = run(*arguments)
    assert again.exit_code == 0 and f"Found finished in {out}" in again.stdout and "reading" not in again.stderr
    refused = run("wikitext2", "--source", files, "--out", tmp_path / "new")
    assert refused.exit_code == 2 and "Error: this is not WikiText-2" in refused.stderr
    assert run().exit_code == 2 and "name a corpus" in run().stderr
    assert "http://mattmahoney.net" in run("--list").stdout


def test_a_corpus_is_one_row_of_the_table(files, tmp_path, monkeypatch):
    row = replace(CORPORA["wikitext2"], what="a corpus of mine", obtain="ask me for it")
    monkeypatch.setitem(CORPORA, "mine", row)
    assert "mine         a corpus of mine\n             ask me for it" in run("--list").stdout
    done = run("mine", "--source", files, "--out", tmp_path / "out", "--allow-other")
    assert done.exit_code == 0 and "in the format of mine but not that corpus" in done.stdout


def test_ctrl_c(files, tmp_path, monkeypatch):
    from fastweights.data.text import build

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build_text", stop)
    result = run("wikitext2", "--source", files, "--out", tmp_path / "out")
    assert result.exit_code == 130 and "nothing was finished" in result.stderr


def test_the_bar_on_a_terminal(files, tmp_path, monkeypatch, capsys):
    import rich.console

    from fastweights.commands.data import _display

    monkeypatch.setattr(rich.console.Console, "is_terminal", True)
    with _display() as report:
        prepare("wikitext2", files, tmp_path / "out", allow_other=True, report=report)
    assert "reading train" in capsys.readouterr().err


def test_preparing_needs_neither_torch_nor_numpy():
    modules = "fastweights.commands.data, fastweights.data.prepare"
    code = f"import sys, {modules}; print({{'torch', 'numpy'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"
