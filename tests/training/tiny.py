"""A language model of two layers on random tokens, and what the tests of training do with it again and again."""

import io
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.training.engine.config import TrainingConfig
from fastweights.training.engine.loop import train
from fastweights.training.engine.task import LossOutcome, Task
from fastweights.training.runs.log import read_log

VOCABULARY, WIDTH, BATCH, LENGTH = 11, 8, 4, 6
EPOCH = 5


class TinyModel(nn.Module):
    """Tied embeddings, two fast-weight layers, dropout."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(FastWeightAttention(WIDTH, 2) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def nll(self, tokens, targets, states):
        x = self.embedding(tokens)
        after = []
        for layer, state in zip(self.layers, states or [None, None], strict=True):
            y, state = layer(x, state)
            x = x + self.dropout(y)
            after.append(state)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"), after


class TinyBatch(NamedTuple):
    tokens: torch.Tensor
    targets: torch.Tensor
    starts_epoch: bool
    poisoned: bool


class TinyTask(Task):
    """The next token of streams of which each depends on the one before; states are carried within an epoch."""

    def __init__(self, dropout=0.1, carried=True, ragged=False, poison=None):
        self.dropout, self.carried, self.ragged, self.poison = dropout, carried, ragged, poison
        generator = torch.Generator().manual_seed(7)
        noise = torch.randint(0, 2, (BATCH, EPOCH * LENGTH + 1), generator=generator)
        self.stream = (noise.cumsum(1) * 3) % VOCABULARY

    def build(self):
        return TinyModel(self.dropout)

    def place(self, device):
        self.stream = self.stream.to(device)

    def batch(self, index, rank, world):
        start, length, total = index % EPOCH * LENGTH, LENGTH, BATCH
        if self.ragged:
            # Unequal numbers of tokens in successive batches and, where there are two, in the processes.
            length, total = LENGTH - index % 3, BATCH - 1
        rows = slice(rank * BATCH // world, min((rank + 1) * BATCH // world, total))
        tokens, targets = (self.stream[rows, start + shift : start + shift + length] for shift in (0, 1))
        return TinyBatch(tokens, targets, index % EPOCH == 0, index == self.poison)

    def loss(self, model, batch, carry):
        nll, states = model.nll(batch.tokens, batch.targets, None if batch.starts_epoch else carry)
        loss = nll.mean()
        if batch.poisoned:
            loss = loss * float("nan")
        return LossOutcome(
            loss, {"tokens": nll.numel(), "largest": nll.detach().max()}, states if self.carried else None
        )

    def validate(self, model):
        nll, _ = model.nll(self.stream[:, :-1], self.stream[:, 1:], None)
        return {"loss": float(nll.mean())}

    def describe(self):
        return {"name": "tiny", "dropout": self.dropout, "carried": self.carried}


def config(**changes):
    """Short, and with a record of every step."""
    settings = {"steps": 12, "lr": 0.02, "warmup": 3, "seed": 3, "accelerator": "cpu", "tensorboard": False}
    settings |= {"log_every": 1, "eval_every": 4, "checkpoint_every": 3, "checkpoint_minutes": None}
    return TrainingConfig(**settings | changes)


def quiet():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def run(out, task=None, fresh=False, minutes=None, console=None, **changes):
    """Train the tiny task."""
    task = task or TinyTask()
    return train(task, config(**changes), out, fresh=fresh, minutes=minutes, console=console or quiet())


def losses(out, kind="train", name="loss"):
    """(step, loss) of every record."""
    return [(r["step"], r[name]) for r in read_log(Path(out) / "log.jsonl") if r["kind"] == kind]


class TinyBlocks(TinyTask):
    """The same with its layers named as blocks, whose matrices Muon can turn."""

    def regions(self, model):
        return list(model.layers)
