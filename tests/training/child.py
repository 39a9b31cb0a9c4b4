"""Training processes of their own, to be killed: child.py OUT WAY... starts one for each way, with one import for all.

Prints "ready WAY PID" where a process waits for a signal, and at the end the exit codes as JSON.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning_fabric  # noqa: F401
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastweights.training.runs import checkpoint as checkpoints
from tests.training.tiny import TinyTask, run


class DiesInTraining(TinyTask):
    def batch(self, index, rank, world):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(index, rank, world)


class Waits(TinyTask):
    """Says where it is and waits for a signal from outside."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def batch(self, index, rank, world):
        if index == 7:
            os.write(1, f"ready {self.way} {os.getpid()}\n".encode())
            # A signal whose handler returns does not end sleep.
            end = time.monotonic() + 60
            while signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None) and time.monotonic() < end:
                time.sleep(0.01)
        return super().batch(index, rank, world)


def die_in_writing(step, name):
    """Kill -9 when half of a file of that step's checkpoint is on the disk."""
    write = checkpoints._write

    def short(path, content):
        if f"step-{step:08d}" in str(path) and path.name == name:
            path.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, content)

    checkpoints._write = short


def work(out, way):
    if way.startswith("writing-"):
        die_in_writing(9, way.removeprefix("writing-"))
    tasks = {"training": DiesInTraining, "SIGINT": lambda: Waits(way), "SIGTERM": lambda: Waits(way)}
    run(out, tasks.get(way, TinyTask)())


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, ways = Path(sys.argv[1]), sys.argv[2:]
    processes = {}
    for way in ways:
        processes[way] = os.fork()
        if not processes[way]:
            work(folder / way, way)
            sys.exit(0)
    codes = {way: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for way, process in processes.items()}
    print(json.dumps(codes), flush=True)
