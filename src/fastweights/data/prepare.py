"""From the files of a corpus to a folder that `Corpus.load` reads; the corpora are in `registry`."""

import hashlib
import platform
import sys
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fastweights
from fastweights.common.files import locked, remove_stale_temporaries
from fastweights.common.tables import look_up
from fastweights.data.manifest import (
    FORMAT,
    SPLITS,
    DataError,
    Report,
    checksum,
    damage,
    files,
    partial_folder,
    publish,
    read_manifest,
    silent,
)
from fastweights.data.pairs.files import language_of
from fastweights.data.registry import CORPORA, PUBLISHED_SETS, CorpusKind
from fastweights.data.sources import Built, CorpusFiles, CorpusRequest, Source, fetch
from fastweights.data.tokenizer import TOKENIZERS

_LEAST = {"min_count": 1, "pairs": 1, "held_out": 1, "highest": 999}
# Names that options had in version 0.1.0, and have in its manifests.
_RENAMED = {"max_words": "vocabulary_size", "vocab": "vocabulary_size"}


class Prepared(NamedTuple):
    """The manifest of a corpus, and whether it was made now or found finished."""

    manifest: dict[str, Any]
    fresh: bool


def prepare(
    kind: str,
    source: Path | str | None,
    out: Path | str,
    *,
    allow_other: bool = False,
    force: bool = False,
    report: Report = silent,
    **options: Any,
) -> Prepared:
    """Write the corpus of that kind into the folder `out`, or find it finished there.

    Args:
        kind: a name from CORPORA.
        source: folder, file or zip archive, as the kind has it; None to fetch what can be fetched.
        allow_other: take files in the format of a published corpus whose counts are not its own. The manifest then
            has their name and `"official": false`.
        force: prepare again what is finished. Until the new files are whole, the old ones stay.
        report: told of each stage with the fraction that is done.
        options: `tokens`, `vocabulary_size`, `min_count`, `valid`, `test` and others where the kind takes them.
    """
    row, out = look_up(CORPORA, kind, "corpus"), Path(out)
    chosen = {_RENAMED.get(name, name): value for name, value in options.items() if value is not None}
    for name in chosen.keys() - row.options.keys():
        takers = ", ".join(other for other, entry in CORPORA.items() if name in entry.options) or "none"
        raise DataError(f"corpus {kind!r} has no --{name.replace('_', '-')}; those that have it: {takers}")
    if source is None and row.find and row.hub is None:
        raise DataError(f"corpus {kind!r} needs a --source: {row.obtain}")
    if source is not None and row.find is None:
        raise DataError(f"corpus {kind!r} has no source, got {source}; {row.obtain}")
    for name, least in _LEAST.items():
        if chosen.get(name, least) < least:
            raise DataError(f"--{name.replace('_', '-')} must be at least {least}, got {chosen[name]}")
    _check_tokens(chosen)
    path = None if source is None else Path(source)
    request = CorpusRequest(report=report, **{**row.options, **chosen})
    try:
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            # Some network file systems know no such lock; two preparations at once are then the caller's affair.
            with suppress(OSError):
                held.enter_context(locked(out))
            remove_stale_temporaries(out)
            manifest = None if force else _finished(kind, row, path, request, out)
            if manifest is not None:
                return Prepared(manifest, False)
            return Prepared(_prepare(kind, row, path, request, out, allow_other), True)
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror or error}; nothing was finished in {out}") from None


def _check_tokens(options: dict[str, Any]) -> None:
    """Refuse a kind of tokens that is not there, or options that it does not have."""
    tokens = options.get("tokens", "words")
    look_up(TOKENIZERS, tokens, "kind of tokens")
    for name in ("min_count", "vocabulary_size"):
        if tokens == "bytes" and name in options:
            shown = f"--{name.replace('_', '-')} {options[name]}"
            raise DataError(f"{shown} has no meaning with --tokens bytes, which are always 256; leave it out")


def _finished(
    kind: str, row: CorpusKind, source: Path | None, request: CorpusRequest, out: Path
) -> dict[str, Any] | None:
    """Return the manifest of what is finished in `out`, if that is what is asked for."""
    manifest = read_manifest(out)
    if manifest is None:
        return None
    remedy = "choose another --out, or --force to replace it"
    if manifest["kind"] != kind:
        raise DataError(f"{out} holds the corpus {manifest['kind']!r}, not {kind!r}; {remedy}")
    before, now = manifest["options"], _plain(request, row)
    # Before there was a choice of tokens.
    older = {"tokens": "words"} if "tokens" in now else {}
    if {**older, **{_RENAMED.get(name, name): value for name, value in before.items()}} != now:
        raise DataError(f"{out} was prepared with {before}, not {now}; {remedy}")
    if row.find is not None and source is not None and source.exists():
        now_found = [(path.name, path.stat().st_size) for path in _paths(row.find(source, request, row.obtain))]
        then_read = [(entry["name"], entry["bytes"]) for entry in manifest["source"]["files"]]
        if now_found != then_read:
            raise DataError(f"{out} was prepared from other files: {then_read}, now {now_found}; {remedy}")
    wrong = damage(out, manifest)
    if wrong is not None:
        request.report(f"{out} is damaged ({wrong}): preparing it again", 0.0)
        return None
    return manifest


def _prepare(
    kind: str, row: CorpusKind, source: Path | None, request: CorpusRequest, out: Path, allow_other: bool
) -> dict[str, Any]:
    with partial_folder(out) as folder:
        name = kind if source is None else source.resolve().name
        if source is None and row.hub is not None:
            # In a folder of their own: what is written from them may have the same names.
            name, source = row.hub.name, folder / "fetched"
            source.mkdir()
            fetch(row.hub, source, row.obtain, request.report)
        sources = row.find(source, request, row.obtain) if row.find and source else {}
        built = row.build(sources, folder, request)
        wrong = _differences(row, built, allow_other)
        official = row.official is not None and not wrong
        request.report("checksums", 0.0)
        tokenizer, own = built.tokenizer, out.resolve().name if row.named_by_out else name
        (folder / tokenizer.file).write_bytes(tokenizer.dump())
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "kind": kind,
            "official": official,
            "name": row.official.name if official and row.official else own,
            "source": {"name": name, "files": [{"name": path.name, **checksum(path)} for path in _paths(sources)]},
            "options": _plain(request, row),
            "dtype": tokenizer.dtype,
            "byteorder": sys.byteorder,
            "vocabulary": {"file": tokenizer.file, "kind": tokenizer.kind, "size": tokenizer.size},
            **({"layout": "pairs", "languages": list(built.languages)} if built.languages else {}),
            "splits": built.splits,
            "versions": {"fastweights": fastweights.__version__, "python": platform.python_version()},
        }
        for entry in files(manifest):
            entry |= checksum(folder / entry["file"])
        for split, what in _sets(sources).items():
            manifest["splits"][split]["set"] = what
        publish(folder, out, manifest, request.report)
        return manifest


def _differences(row: CorpusKind, built: Built, allow_other: bool) -> list[str]:
    """Say in what this is not the published corpus; an error unless that is allowed."""
    for split, entry in built.splits.items():
        if built.languages and not entry["pairs"]:
            raise DataError(f"{split} has no pair of lines with something in both languages; {row.obtain}")
        if not built.languages and entry["tokens"] < 2:
            raise DataError(f"{split} has {entry['tokens']} tokens, too few to predict one from another; {row.obtain}")
    wrong = row.official.differences(built) if row.official else []
    if row.official and wrong and not allow_other:
        raise DataError(
            f"this is not {row.official.name}, or not all of it: {'; '.join(wrong)}. {row.obtain[0].upper()}"
            f"{row.obtain[1:]}; --allow-other prepares another corpus in this format, under its own name"
        )
    return wrong


def _sets(sources: CorpusFiles) -> dict[str, str]:
    """Name the validation and the test set, which need not be of the corpus that the training text is of."""
    named: dict[str, dict[str, None]] = {}
    for key, places in sources.items():
        # Texts lie by split, sentence pairs by split and language.
        split, _, language = key.partition(".")
        if split in SPLITS[1:]:
            names = (language_of(source.path)[0] if language else _set_name(source) for source in places)
            named.setdefault(split, {}).update(dict.fromkeys(names))
    return {split: ", ".join(names) for split, names in named.items()}


def _set_name(source: Source) -> str:
    """Return the name of a file, and of the published corpus that it is from if its content is known."""
    name = source.path.name if source.member is None else PurePosixPath(source.member).name
    digest = hashlib.sha256()
    for _, block in source.blocks():
        digest.update(block)
    published = PUBLISHED_SETS.get(digest.hexdigest())
    return name if published is None else f"{name} of {published}"


def _plain(request: CorpusRequest, row: CorpusKind) -> dict[str, Any]:
    """Return the options as they stand in a manifest: files by name, as machines differ in their folders."""
    values = {name: getattr(request, name) for name in row.options}
    return {name: value.name if isinstance(value, Path) else value for name, value in values.items()}


def _paths(sources: CorpusFiles) -> list[Path]:
    return list(dict.fromkeys(source.path for files in sources.values() for source in files))
