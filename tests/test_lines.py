"""Groups of lines from files, pipes and terminals: all lines in their order, and none that waits for others to come."""

import io
import os
import pty
import threading
from itertools import chain

import pytest

from fastweights.commands.translate import WINDOW, waiting_lines
from fastweights.data.manifest import DataError


@pytest.fixture
def pipe():
    """The end to read and the end to write."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file, os.fdopen(writing, "wb", buffering=0) as out:
        yield file, out


def test_a_file_is_read_in_groups_as_large_as_they_may_be(tmp_path):
    lines = [f"line {i} ü" for i in range(2 * WINDOW + 7)]
    (tmp_path / "lines").write_text("\n".join(lines), "utf-8")
    with (tmp_path / "lines").open("rb") as file:
        groups = list(waiting_lines(file, "it"))
    assert [len(group) for group in groups] == [WINDOW, WINDOW, 7]
    assert list(chain(*groups)) == lines


def test_a_pipe_is_read_as_it_is_written(pipe):
    file, out = pipe
    groups = waiting_lines(file, "it", window=3)
    out.write(b"a\nb\nthe begin")
    assert next(groups) == ["a", "b"]
    out.write(b"ning\n\n\nc\nd\n")
    assert next(groups) == ["the beginning", "", ""] and next(groups) == ["c", "d"]
    out.write("ü".encode()[:1])
    out.write("ü".encode()[1:])
    out.close()
    assert list(groups) == [["ü"]]


def test_more_than_a_pipe_holds_comes_in_order(pipe):
    file, out = pipe
    lines = [str(i) * 30 for i in range(5000)]

    def write():
        with out:
            out.write("".join(f"{line}\n" for line in lines).encode())

    writer = threading.Thread(target=write)
    writer.start()
    found = list(waiting_lines(file, "it"))
    writer.join()
    assert list(chain(*found)) == lines and max(map(len, found)) <= WINDOW


def test_a_terminal_gives_a_line_at_a_time_until_its_end():
    typing, terminal = pty.openpty()
    with os.fdopen(terminal, "rb") as file, os.fdopen(typing, "wb", buffering=0) as keys:
        groups = waiting_lines(file, "it")
        for line in ("first", "second"):
            keys.write(f"{line}\n".encode())
            assert next(groups) == [line]
        keys.write(b"\x04")
        assert next(groups, None) is None


@pytest.mark.parametrize(
    ("content", "lines"),
    [(b"", []), (b"\n", [""]), (b"a", ["a"]), (b"a\n", ["a"]), (b"\xef\xbb\xbfa\r\n b \r\n\x0c\n", ["a", "b", ""])],
)
def test_the_ends_of_lines_and_of_files(content, lines):
    assert list(chain(*waiting_lines(io.BytesIO(content), "it"))) == lines


def test_what_is_not_text_is_named_with_its_line():
    groups = waiting_lines(io.BytesIO(b"a\nb\nc\nd\ne\xff\n"), "standard input", window=2)
    assert next(groups) == ["a", "b"] and next(groups) == ["c", "d"]
    with pytest.raises(DataError, match="standard input is not UTF-8: 0xff in line 5: invalid start byte"):
        next(groups)
