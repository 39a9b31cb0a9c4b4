"""The file a benchmark leaves: its rows, and what they were measured with."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastweights.common.files import write_atomically
from fastweights.common.provenance import commit, hardware, versions


def write_record(
    out: Path, benchmark: str, device: str, seed: int, start: float, rows: Sequence[dict[str, Any]]
) -> None:
    """Write `rows` to `out`; `start` is `time.perf_counter()` at the benchmark's beginning."""
    record = {
        "benchmark": benchmark,
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "wall_s": round(time.perf_counter() - start, 1),
        "rows": list(rows),
    }
    write_atomically(out, (json.dumps(record, indent=1) + "\n").encode())
