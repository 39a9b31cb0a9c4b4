"""One cell of associative retrieval, Sec. 6.1: one model at one size and seed, its training and its result."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastweights.common.tables import at_least_one, look_up
from fastweights.data.synthetic import Batch, evaluation_batch, training_batches
from fastweights.models.retrieval import MODELS, Entry, RetrievalModel, half_squared_error
from fastweights.models.retrieval_shortcuts import ShortcutRetrievalModel

OnProgress = Callable[["RetrievalConfig", int, float], None]


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """One cell, at the paper's protocol unless told otherwise.

    Where the paper is silent the authors' released code is followed; where the two differ the paper is, and the code's
    way is an option.

    Args:
        setting: 1 (without replacement, L = S) or 2 (with replacement, L = 2 S).
        model: a name from `MODELS[setting]`.
        size: S, the number of keys and of values.
        seed: of initial weights, data and random features.
        d_key: size of keys and queries before the feature map.
        batch, lr: of training; None for those of the model's row in `MODELS` (32 and 1e-3, except for "schlag2021").
        max_steps: where training ends at the latest.
        eval_every: steps between two evaluations.
        eval_sequences: fresh sequences of an evaluation.
        target: training ends at an evaluation loss of this or less.
        patience: and after this many steps without a new best. The code needs eleven evaluations for that, 1100 steps.
        eval_length: pairs in a sequence of an evaluation. None for S in either setting, as in the code and in the
            paper's figures; the paper's text can be read as 2 S in setting 2.
        query_cap: queries of one sequence in an evaluation. None for all keys it holds; the code stops at 200.
        chunk_mean: the code's mean of an evaluation, over chunks of up to `batch` queries of a sequence, the last
            and shorter one weighing as much as the others; the plain mean over all queries otherwise.
        orthogonal: FAVOR+'s random vectors orthogonal in blocks, as in the code; independent otherwise.
        redraw_at_eval: new random vectors for each evaluation, as in the code; one set, drawn once, otherwise.
        read_eps: added to z·φ(q), and to the sum of φ(q) under the delta rule, as in the code. The paper has no such
            term (0), but FAVOR+'s failure depends on it: its kernel falls far below 1e-6 and the output to 0.
        exact_shortcuts: compute with `ShortcutRetrievalModel`, which gives the losses of the plain `RetrievalModel`, up
            to rounding, in a fraction of the time; False for the plain one.
    """

    setting: int
    model: str
    size: int
    seed: int = 1
    d_key: int = 64
    batch: int | None = None
    lr: float | None = None
    max_steps: int = 100_000
    eval_every: int = 100
    eval_sequences: int = 20
    target: float = 0.001
    patience: int = 1000
    eval_length: int | None = None
    query_cap: int | None = None
    chunk_mean: bool = False
    orthogonal: bool = False
    redraw_at_eval: bool = False
    read_eps: float = 1e-6
    exact_shortcuts: bool = True

    def __post_init__(self) -> None:
        if self.setting not in MODELS:
            raise ValueError(f"setting must be one of {', '.join(map(str, MODELS))}, got {self.setting!r}")
        look_up(MODELS[self.setting], self.model, f"model of setting {self.setting}")
        if not isinstance(self.size, int) or self.size < 2:
            raise ValueError(f"size must be a whole number of at least 2, got {self.size!r}")
        for name in ("d_key", "batch", "max_steps", "eval_every", "eval_sequences", "eval_length", "query_cap"):
            if getattr(self, name) is not None:
                at_least_one(**{name: getattr(self, name)})
        if not self.read_eps >= 0:
            raise ValueError(f"read_eps must be at least 0, got {self.read_eps!r}")

    @property
    def entry(self) -> Entry:
        """Return the model's row of `MODELS`."""
        return MODELS[self.setting][self.model]

    @property
    def training_batch(self) -> int:
        """Return `batch`, or the model's own."""
        return self.entry.batch if self.batch is None else self.batch


@dataclass
class RetrievalResult:
    """The outcome of a cell. `stopped` is "target", "patience", "max_steps" or "diverged" (last loss NaN)."""

    last_loss: float = math.nan
    best_loss: float = math.nan
    steps: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    stopped: str = ""
    wall_s: float = 0.0

    def observe(self, config: RetrievalConfig, step: int, loss: float) -> bool:
        """Take an evaluation into account; True when it is the last."""
        loss = loss if math.isfinite(loss) else math.nan
        self.steps, self.last_loss = step, loss
        self.curve.append((step, loss))
        # NaN can only be the last, and `min` passes over it.
        best_step, self.best_loss = min(self.curve, key=lambda point: point[1])
        if math.isnan(loss):
            self.stopped = "diverged"
        elif loss <= config.target:
            self.stopped = "target"
        elif step - best_step >= config.patience:
            self.stopped = "patience"
        elif step >= config.max_steps:
            self.stopped = "max_steps"
        return bool(self.stopped)


class RetrievalCell:
    """A model in training: its weights, optimiser and random numbers, and the mathematics of a block of steps."""

    def __init__(
        self, config: RetrievalConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, self.device = config, torch.device(device)
        entry = config.entry
        initial = torch.Generator().manual_seed(config.seed)
        kind = ShortcutRetrievalModel if config.exact_shortcuts else RetrievalModel
        self.model = kind(
            config.size,
            entry,
            config.d_key,
            initial,
            read_eps=config.read_eps,
            orthogonal=config.orthogonal,
            dtype=dtype,
        ).to(self.device)
        # What evaluations use if features are not drawn for each of them.
        self.fixed_features = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(
            self.parameters,
            lr=entry.lr if config.lr is None else config.lr,
            fused=True,
            capturable=self.device.type == "cuda",
        )
        # Other numbers than those of the initial weights. The CPU's generator looks at 32 bits of a seed only.
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 10**6)

    def step(self, batch: Batch) -> Tensor:
        """Take one step of Adam on a mini-batch, and return the loss before it."""
        self.model.phi.redraw(self.generator)
        loss = half_squared_error(self.model(*batch[:3]), *batch[3:])
        self.update(loss)
        return loss.detach()

    def update(self, loss: Tensor) -> None:
        """Take a step of Adam down the gradient of `loss`."""
        for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, self.parameters), strict=True):
            # The fused Adam reads a gradient in the order of memory, as if it had the parameter's strides.
            parameter.grad = gradient.contiguous()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        """Take `count` steps on fresh data."""
        config = self.config
        for batch in training_batches(config.setting, config.size, count, config.training_batch, self.generator):
            self.step(batch)

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Compute the mean loss over all queries of fresh sequences."""
        config = self.config
        batch = evaluation_batch(
            config.setting,
            config.size,
            config.eval_sequences,
            self.generator,
            config.eval_length,
            config.query_cap,
            config.training_batch if config.chunk_mean else None,
        )
        if config.redraw_at_eval:
            self.model.phi.redraw(self.generator)
        else:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.fixed_features[name])
        return half_squared_error(self.model(*batch[:3]), *batch[3:])


def train_cell(config: RetrievalConfig, on_progress: OnProgress | None = None) -> RetrievalResult:
    """Train one cell on the CPU in this process, with one thread: no sum's order then depends on the machine."""
    start, result = time.perf_counter(), RetrievalResult()
    with one_thread():
        cell, step = RetrievalCell(config), 0
        while not result.stopped:
            count = min(config.eval_every, config.max_steps - step)
            cell.steps(count)
            step += count
            loss = float(cell.evaluate())
            result.observe(config, step, loss)
            if on_progress is not None:
                on_progress(config, step, loss)
    result.wall_s = time.perf_counter() - start
    return result


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread, and take numbers below 1e-38 for 0.

    FAVOR+ makes many of these and its read-out is the same without them, but a CPU needs ten times as long for each.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)
