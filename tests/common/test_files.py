"""Temporary files of killed processes go after a day; those of living ones stay."""

import os
import time
from pathlib import Path

from fastweights.common.files import remove_stale_temporaries
from fastweights.data.prepare import prepare

YESTERDAY = time.time() - 25 * 60 * 60


def _age(path: Path) -> None:
    os.utime(path, (YESTERDAY, YESTERDAY))


def test_only_old_temporaries_are_removed(tmp_path: Path) -> None:
    for name in (".log.1.tmp", ".young.2.tmp", "kept.tmp", ".kept"):
        (tmp_path / name).write_text("x")
    for name in (".step-1.3.tmp", ".build.4.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    for name in (".log.1.tmp", "kept.tmp", ".kept", ".step-1.3.tmp/part", ".step-1.3.tmp", ".build.4.tmp"):
        _age(tmp_path / name)

    remove_stale_temporaries(tmp_path)

    # The file inside .build.4.tmp is young: somebody is still writing it.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".build.4.tmp", ".kept", ".young.2.tmp", "kept.tmp"]


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "folder"
    for path in (target, folder):
        path.mkdir()
    (target / "file").write_text("x")
    _age(target / "file")
    (folder / ".link.tmp").symlink_to(target)
    os.utime(folder / ".link.tmp", (YESTERDAY, YESTERDAY), follow_symlinks=False)

    remove_stale_temporaries(folder)

    assert (target / "file").exists() and not list(folder.iterdir())


def test_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    remove_stale_temporaries(tmp_path / "absent")


def test_preparing_a_corpus_cleans_its_folder(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.1.tmp").write_text("{")
    _age(tmp_path / ".manifest.json.1.tmp")

    prepare("numbers", None, tmp_path, pairs=50, held_out=5, vocab=270)

    assert not list(tmp_path.glob(".*.tmp"))
