"""Files that a kill, a crash or a full disk leaves either as they were or complete."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What is written before it is renamed to its final name: `.NAME.tmp`, a file or a folder.
_TEMPORARIES = ".*.tmp"
_DAY_S = 24 * 60 * 60


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path`; whenever the process or the machine stops, it holds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, content)
        temporary.replace(path)
    except OSError as error:
        # A write to a full disk does not say which file it was.
        if error.errno:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a folder, or a file that is made if need be, against other processes; a process that dies lets go.

    They wait for it, or without `wait` get a BlockingIOError. Where the system has no such locks nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_stale_temporaries(folder: Path) -> None:
    """Remove what killed processes left in `folder`: files and folders named `.*.tmp`, unchanged for a day.

    Younger ones may belong to a process that is still writing. What cannot be removed stays without an error.
    """
    for path in folder.glob(_TEMPORARIES):
        with suppress(OSError):
            newest = max(part.lstat().st_mtime for part in (path, *path.rglob("*")))
            if time.time() - newest < _DAY_S:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
