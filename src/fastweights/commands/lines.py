"""Lines of standard input in groups: many of a file at once, those of a person or another program as they come."""

from __future__ import annotations

import io
import select
import time
from collections.abc import Iterator
from typing import BinaryIO

from fastweights.data.pairs.files import decode_line

# Lines that are sorted by length together.
WINDOW = 1024
# Seconds in which a group with lines may wait for more: `cat` needs some time between two pieces of a file.
PATIENCE = 0.02
_PIECE = 1 << 16


def waiting_lines(file: BinaryIO, name: str, window: int = WINDOW) -> Iterator[list[str]]:
    """Yield the lines of a UTF-8 file in groups of up to `window`; a group ends early where no further line is waiting.

    What follows the last end of a line is a line too; white space at the ends of lines is left out.

    Raises:
        DataError: a line is not UTF-8; it is named by `name` and its number.
    """
    lines: list[bytes] = []
    rest, done, until, more = b"", 0, 0.0, True
    while more:
        # What there is, once there is something; nothing is the end.
        piece = file.read1(_PIECE)  # type: ignore[attr-defined]
        more = bool(piece)
        if not lines:
            until = time.monotonic() + PATIENCE
        *whole, rest = (rest + piece).split(b"\n")
        lines += whole if more or not rest else [*whole, rest]
        while len(lines) >= window or (lines and not (more and _ready(file, until))):
            group, lines = lines[:window], lines[window:]
            yield [decode_line(line, done + i, name) for i, line in enumerate(group, 1)]
            done += len(group)
            until = time.monotonic() + PATIENCE


def _ready(file: BinaryIO, until: float) -> bool:
    """Return whether there is something to read, more lines or the end, now or by that time."""
    try:
        descriptor = file.fileno()
    except io.UnsupportedOperation:
        # A file in memory.
        return True
    return bool(select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0])
