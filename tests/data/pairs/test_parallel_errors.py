"""What cannot be paired is refused with the file and the line, and leaves nothing that looks finished."""

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from fastweights.data.manifest import DataError
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from tests.data.pair_files import sentences, write_parallel, write_set


@pytest.fixture
def files(tmp_path):
    write_parallel(tmp_path / "files")
    return tmp_path / "files"


def refused(tmp_path, message, source, **options):
    with pytest.raises(DataError, match=message):
        prepare("parallel", source, tmp_path / "out", **{"vocab": 300} | options)
    with pytest.raises(DataError, match="there is no corpus"):
        ParallelCorpus.load(tmp_path / "out")


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("side", ["en", "de"])
def test_files_of_different_length(files, tmp_path, split, side):
    other = {"en": "de", "de": "en"}[side]
    path = files / f"{split}.{side}"
    rows = path.read_text().splitlines()
    path.write_text("\n".join(rows[:7]) + "\n")
    refused(tmp_path, rf"{split}\.{side} ends after line 7 and .*{split}\.{other} continues: .* not aligned", files)


def test_empty_files_and_lines(files, tmp_path):
    write_set(files, "test", [])
    refused(tmp_path, r"test\.en and .*test\.de are empty", files)
    write_set(files, "test", [*sentences(0, 3), ("four", " "), ("five", "fünf")])
    refused(tmp_path, r"test\.de has nothing in line 4; test must be whole", files)
    write_set(files, "test", sentences(0, 3))
    write_set(files, "train", [("", "eins"), ("two", "")])
    refused(tmp_path, "train has no pair of lines with something in both languages", files)


def test_not_utf8(files, tmp_path):
    path = files / "valid.de"
    rows = path.read_bytes().split(b"\n")
    rows[2] += b" \xff"
    path.write_bytes(b"\n".join(rows))
    refused(tmp_path, r"valid\.de is not UTF-8: 0xff in line 3", files)


def test_what_is_missing(files, tmp_path):
    refused(tmp_path, "is not a folder; give a folder", tmp_path / "nowhere")
    refused(tmp_path, "both 'de'", files, source_language="de")
    refused(tmp_path, r"no two files that end in \.fr and \.es", files, source_language="fr", target_language="es")
    refused(tmp_path, "must be at least 260, got 20", files, vocab=20)
    (files / "valid.de").unlink()
    refused(tmp_path, r"valid\.en has no counterpart valid\.de in", files)
    (files / "valid.en").unlink()
    refused(tmp_path, r"nothing for valid \(or name it with --valid\), it holds test, train", files)
    write_set(files, "valid", sentences(0, 3))
    (files / "train.en.gz").write_bytes(b"")
    refused(tmp_path, r"more than one file .*train\.en, .*train\.en\.gz; keep one", files)


def test_sets_of_one_language(files, tmp_path):
    """Left out with a word, unless one of them is asked for."""
    write_set(files, "news", sentences(3, 4), languages=("en", "cs"))
    told = []
    prepare("parallel", files, tmp_path / "good", vocab=300, report=lambda stage, fraction: told.append(stage))
    assert "left out, being in one language only: news" in told
    assert ParallelCorpus.load(tmp_path / "good").manifest["splits"]["train"]["pairs"] == 60
    refused(tmp_path, r"news\.en has no counterpart news\.de in", files, valid=Path("news"))
    for path in files.glob("*.de"):
        path.unlink()
    refused(tmp_path, r"nothing for train, it holds no two files .*train\.en has no counterpart train\.de", files)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("kind", ["", ".sgm"])
def test_damaged_archives(files, tmp_path, suffix, kind):
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix]
    path = files / "valid.de"
    text = path.read_bytes()
    path.unlink()
    packed = files / f"valid.de{kind}{suffix}"
    for content in (pack(text)[:-9], b"something else" * 9):
        packed.write_bytes(content)
        refused(tmp_path, rf"{packed.name} is damaged or cut short", files)
