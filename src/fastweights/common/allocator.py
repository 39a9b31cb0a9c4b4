"""Keep memory that PyTorch frees on the CPU from going back to the system."""

import ctypes
import os
import sys

# Names of glibc's mallopt. Allocations from the first size on are mapped for themselves, and it has no larger one; more
# than the second at the end of the heap goes back to the system.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_MAPPED_FROM, _KEPT = 2**25, 2**30
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Keep up to 1 GiB of freed memory in this process, where the C library is glibc and no variable sets it otherwise.

    It gives large blocks back as soon as they are free, and the next update of a training gets them anew, page by page,
    each emptied by the system.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_TRIM_THRESHOLD, _KEPT)
