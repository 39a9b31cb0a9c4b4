"""A corpus on disk: token files, a vocabulary, and a manifest that is written last and says what must be there.

    OUT/train.bin  valid.bin  test.bin      token numbers, uint16 or uint32, without a header
    OUT/vocabulary.txt or .json             see `vocabulary`
    OUT/manifest.json                       format, source, counts and checksums

Sentence pairs lie in other files, listed in `pairs`, beside the same manifest with `"layout": "pairs"`.
A folder without a manifest is not a corpus, whatever else is in it. Nothing here needs PyTorch.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastweights.common.files import write_atomically
from fastweights.common.tables import check_types

FORMAT = 1
SPLITS = ("train", "valid", "test")
ITEM_BYTES = {"uint16": 2, "uint32": 4}
TYPE_CODES = {"uint16": "H", "uint32": "I"}
# Where the corpora that need no download are prepared on first use.
EMBEDDED, NUMBERS = Path("data") / "embedded", Path("data") / "numbers"
_NAME = "manifest.json"
_PARTIAL = ".partial"

Report = Callable[[str, float], None]


class DataError(ValueError):
    """A corpus cannot be prepared or read; the message says why and what would work."""


def silent(stage: str, fraction: float) -> None:
    """Report nothing."""


def checksum(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest, None where there is none; DataError for one that this version cannot read."""
    path = folder / _NAME
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        check_types(manifest, {"format": int})
        if manifest["format"] == FORMAT:
            check_types(manifest, _ENTRIES)
            _ = ITEM_BYTES[manifest["dtype"]]
            stream = layout(manifest) == "stream"
            for split in SPLITS if stream else SPLITS[:2]:
                check_types(manifest["splits"][split], {"tokens" if stream else "pairs": int})
            for entry in files(manifest):
                check_types(entry, {"file": str, "bytes": int, "sha256": str})
                check_types({"tokens": 0, **entry}, {"tokens": int})
            for entry in manifest["source"]["files"]:
                check_types(entry, {"name": str, "bytes": int})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not the manifest of a corpus ({type(error).__name__}: {error}); prepare the corpus again, with "
            "--force where this one stands"
        ) from None
    if manifest["format"] != FORMAT:
        raise DataError(
            f"{path} has format {manifest['format']!r}, this version reads {FORMAT}; prepare the corpus again"
        )
    if (byteorder := manifest["byteorder"]) != sys.byteorder:
        raise DataError(f"{folder} was written {byteorder}-endian and this machine is not; prepare it again here")
    return manifest


_ENTRIES: dict[str, type] = {"kind": str, "name": str, "byteorder": str, "dtype": str}
_ENTRIES |= {"options": dict, "source": dict, "vocabulary": dict, "splits": dict}


def layout(manifest: dict[str, Any]) -> str:
    """Say how the corpus lies: as one "stream" of tokens for each split, or in "pairs"."""
    return str(manifest.get("layout", "stream"))


def files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the files that belong to the corpus."""
    splits = [manifest["splits"][split] for split in SPLITS if split in manifest["splits"]]
    return [manifest["vocabulary"], *(entry for split in splits for entry in split.get("files", {"": split}).values())]


def sets(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the names of the validation and the test set, without those that were cut from the training text."""
    splits = manifest["splits"]
    return {split: splits[split]["set"] for split in SPLITS if "set" in splits.get(split, {})}


def fingerprint(manifest: dict[str, Any]) -> str:
    """Return a name of the tokens and the vocabulary, wherever they lie, by which a run knows its corpus."""
    return hashlib.sha256("".join(entry["sha256"] for entry in files(manifest)).encode()).hexdigest()[:16]


def finished(folder: Path, wanted: str, verify: bool) -> dict[str, Any]:
    """Return the manifest of a complete corpus in the wanted layout: sizes, and with `verify` checksums, are right."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"there is no corpus in {absence(folder)}; `fastweights data KIND --out` writes one")
    if layout(manifest) != wanted:
        uses = {"stream": "text for language models", "pairs": "sentence pairs for translation"}
        raise DataError(f"the corpus {manifest['kind']!r} in {folder} is {uses[layout(manifest)]}, not {uses[wanted]}")
    wrong = damage(folder, manifest, verify)
    if wrong is not None:
        raise DataError(f"the corpus in {folder} is damaged: {wrong}; prepare it again")
    return manifest


def absence(folder: Path) -> str:
    """Return the name of a folder without a corpus, and why it has none."""
    if folder.is_dir():
        return f"{folder}, which was not finished or is something else"
    return f"{folder}, which {'is a file where a folder is wanted' if folder.exists() else 'does not exist'}"


def damage(folder: Path, manifest: dict[str, Any], verify: bool = False) -> str | None:
    """Say what is wrong with the files beside the manifest: their sizes, and with `verify` their checksums."""
    for entry in files(manifest):
        if "tokens" in entry and entry["bytes"] != entry["tokens"] * ITEM_BYTES[manifest["dtype"]]:
            return f"the manifest gives {entry['file']} {entry['bytes']:,} bytes for {entry['tokens']:,} tokens"
    for entry in files(manifest):
        path = folder / entry["file"]
        if not path.is_file():
            return f"{entry['file']} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{entry['file']} has {path.stat().st_size:,} bytes, {entry['bytes']:,} were written"
        if verify and checksum(path)["sha256"] != entry["sha256"]:
            return f"{entry['file']} was changed: its SHA-256 is not the one it was written with"
    return None


@contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """Open an empty folder inside `out` to write in, removed afterwards; what a killed preparation left goes first."""
    partial = out / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, out: Path, manifest: dict[str, Any], report: Report) -> None:
    """Move the finished files into `out`: the old manifest goes first and the new one comes last."""
    (out / _NAME).unlink(missing_ok=True)
    entries = files(manifest)
    for number, entry in enumerate(entries):
        report("finishing", number / len(entries))
        path = partial / entry["file"]
        with path.open("rb") as file:
            # The manifest must not reach the disk before what it vouches for.
            os.fsync(file.fileno())
        path.replace(out / entry["file"])
    report("finishing", 1.0)
    write_atomically(out / _NAME, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
