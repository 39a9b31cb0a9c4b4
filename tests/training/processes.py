"""Training in two processes, as torchrun starts them: processes.py OUT. What each run raised is in OUT/RANK.json."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import lightning_fabric  # noqa: F401
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastweights.data.pairs.corpus import ParallelCorpus
from tests.training import small_pairs
from tests.training.tiny import TinyBlocks, TinyTask, run


class StopsOne(TinyTask):
    """A signal that only the second process gets."""

    def batch(self, index, rank, world):
        if index == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(index, rank, world)


class PoisonsOne(TinyTask):
    def batch(self, index, rank, world):
        self.poison = 7 if rank == 1 else None
        return super().batch(index, rank, world)


def translation(out, **settings):
    """Pairs that the first process of all has written before there were two."""
    small_pairs.run(ParallelCorpus.load(out.parent / "text" / "pairs"), out, accumulate=2, steps=6, **settings)


RUNS = {
    "ddp": lambda out: run(out, TinyTask(dropout=0.0), strategy="ddp"),
    "auto": lambda out: run(out, TinyTask(dropout=0.0, ragged=True, carried=False), accumulate=2),
    "ddp-muon": lambda out: run(out, TinyBlocks(dropout=0.0), strategy="ddp", optimizer="muon"),
    "ddp-dropout": lambda out: run(out),
    "ddp-stopped": lambda out: run(out, StopsOne()),
    "fsdp": lambda out: run(out, TinyTask(dropout=0.0), strategy="fsdp"),
    "fsdp-muon": lambda out: run(out, TinyBlocks(dropout=0.0), strategy="fsdp", optimizer="muon"),
    "fsdp-accumulated": lambda out: run(
        out, TinyTask(dropout=0.0, ragged=True, carried=False), strategy="fsdp", accumulate=2
    ),
    "fsdp-stopped": lambda out: run(out, StopsOne(dropout=0.0), strategy="fsdp"),
    "fsdp-half": lambda out: run(out, StopsOne(dropout=0.0, carried=False), strategy="fsdp"),
    "diverged": lambda out: run(out, PoisonsOne()),
    "translation-ddp": lambda out: translation(out, strategy="ddp"),
    "translation-fsdp": lambda out: translation(out, strategy="fsdp"),
}
AGAIN = {
    "ddp-stopped": lambda out: run(out),
    "fsdp-stopped": lambda out: run(out, TinyTask(dropout=0.0), strategy="fsdp"),
    "refused": lambda out: run(out.with_name("ddp"), TinyTask(dropout=0.5)),
}


def work(folder, rank):
    torch.set_num_threads(1)
    raised = {}
    for part in (RUNS, AGAIN):
        for name, start in part.items():
            try:
                start(folder / name)
            except (Exception, SystemExit) as error:
                raised[name] = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(raised))


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(Path(sys.argv[1]), int(os.environ["RANK"]))
        sys.exit(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # Forked rather than started by torchrun, to import everything once.
    os.environ |= shared | {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    small_pairs.small_pairs(Path(sys.argv[1]) / "text")
    children = []
    for number in range(2):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            work(Path(sys.argv[1]), number)
            sys.stdout.flush()
            os._exit(0)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
