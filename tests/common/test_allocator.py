"""Memory that was freed is used again, without the system's help."""

import os
import subprocess
import sys

import pytest

from fastweights.common import allocator

# Counts the pages that the system provides for four blocks of 24 MiB, eight times, after two times that do not count.
PROGRAM = """
import resource, runpy, sys

if sys.argv[2] == "keep":
    runpy.run_path(sys.argv[1])["keep_freed_memory"]()
for i in range(10):
    if i == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"1") * (24 * 2**20) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    """Return that number from a process of its own: a heap that others have used may be in any shape."""
    command = [sys.executable, "-c", PROGRAM, allocator.__file__, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(
    sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ),
    reason="the C library is not glibc, or has its settings already",
)
def test_freed_memory_is_used_again():
    assert faults("keep") < faults("give back") / 8
