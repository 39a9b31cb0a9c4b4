"""What benchmarks share: options, and the rows they leave with what they were measured with, as a file or JSON."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fastweights.commands.options import option
from fastweights.common.files import write_atomically
from fastweights.common.provenance import origin

Out = Annotated[Path | None, option("Write the measurements to this JSON file.", False)]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs for each number; the median is reported.")]


class Record:
    """The rows of a benchmark, written to the file `out`, if there is one, after each of them.

    `console` is for people: standard output, or stderr where standard output gets the record as JSON at the end.
    """

    def __init__(self, benchmark: str, device: str, seed: int, out: Path | None, as_json: bool) -> None:
        self.benchmark, self.device, self.seed = benchmark, device, seed
        self.out, self.as_json = out, as_json
        self.console = Console(stderr=as_json)
        self.rows: list[dict[str, Any]] = []
        self._start = time.perf_counter()

    def add(self, *rows: dict[str, Any]) -> None:
        """Append rows and write the file."""
        self.rows.extend(rows)
        if self.out is not None:
            write_atomically(self.out, self._text().encode())

    def finish(self, table: Table, *lines: str) -> None:
        """Show the table and lines below it, and write the rows as they are now."""
        self.console.print(table, *lines, sep="\n")
        self.add()
        if self.out is not None:
            self.console.print(f"written to {self.out}")
        if self.as_json:
            print(self._text(), end="")

    def _text(self) -> str:
        record = {
            "benchmark": self.benchmark,
            **origin(self.device),
            "threads": torch.get_num_threads(),
            "seed": self.seed,
            "wall_s": round(time.perf_counter() - self._start, 1),
            "rows": self.rows,
        }
        return json.dumps(record, indent=1) + "\n"
