"""Memory that was freed is used again, without the system's help."""

import os
import sys

import pytest
import torch

from fastweights.common.allocator import keep_freed_memory


def faults(rounds):
    """Return the pages that the system had to provide for four blocks of 24 MiB in every round."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        blocks = [torch.zeros(24 * 2**20, dtype=torch.uint8) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(
    sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ),
    reason="the C library is not glibc, or has its settings already",
)
def test_freed_memory_is_used_again():
    keep_freed_memory()
    faults(2)
    assert faults(8) < 96 * 2**20 // 4096
