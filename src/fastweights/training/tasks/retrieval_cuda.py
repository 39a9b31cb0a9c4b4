"""Cells on a GPU: blocks of steps as CUDA graphs, several cells at a time, each on a stream of its own.

The mathematics is that of `RetrievalCell`. A graph replays its kernels without Python; the host looks at a cell once in
`eval_every` steps, when its loss has arrived.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastweights.training.tasks.retrieval_cell import OnProgress, RetrievalCell, RetrievalConfig, RetrievalResult


class GraphedCell:
    """A cell whose steps and evaluation are recorded once and then replayed.

    `advance` only queues work. `ready` says whether the loss it ends with has come back, and `loss` is that number.
    """

    def __init__(self, config: RetrievalConfig, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.config, self.stream, self.step = config, stream, 0
        self.result, self.start = RetrievalResult(), time.perf_counter()
        self.arrived = torch.cuda.Event()
        self.host_loss = torch.zeros((), dtype=torch.float64, pin_memory=True)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.run_block, self.run_evaluation = self._steps, self._evaluate
        with torch.cuda.stream(stream):
            self.cell = RetrievalCell(config, device)
            self.device_loss = torch.zeros((), dtype=torch.float64, device=device)
            self.block = _block(config)
            if _recordable(config):
                self._rehearse()
                steps = self._record(self._steps, None)
                evaluation = self._record(self._evaluate, steps.pool())
                self.graphs = [steps, evaluation]
                self.run_block, self.run_evaluation = steps.replay, evaluation.replay

    def _steps(self) -> None:
        self.cell.steps(self.block)

    def _evaluate(self) -> None:
        self.device_loss.copy_(self.cell.evaluate())

    def _rehearse(self) -> None:
        """Run everything once, so that libraries and the optimiser have what they need, and take its effect back."""
        cell = self.cell
        state = [x.clone() for x in (*cell.parameters, *cell.model.buffers())]
        numbers = cell.generator.get_state()
        cell.steps(1)
        cell.evaluate()
        with torch.no_grad():
            for x, before in zip((*cell.parameters, *cell.model.buffers()), state, strict=True):
                x.copy_(before)
            for moments in cell.optimizer.state.values():
                for moment in moments.values():
                    moment.zero_()
        cell.generator.set_state(numbers)

    def _record(self, work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        # Not `torch.cuda.graph`, which waits for the whole device: other cells are at work on it.
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.cell.generator)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph

    def advance(self) -> None:
        """Queue the steps up to the next evaluation, and that."""
        count = min(self.config.eval_every, self.config.max_steps - self.step)
        with torch.cuda.stream(self.stream):
            for _ in range(count // self.block):
                self.run_block()
            self.run_evaluation()
            self.host_loss.copy_(self.device_loss, non_blocking=True)
            self.arrived.record()
        self.step += count

    @property
    def ready(self) -> bool:
        return self.arrived.query()

    @property
    def loss(self) -> float:
        return float(self.host_loss)

    def close(self) -> None:
        """Give the graphs' memory back."""
        self.stream.synchronize()
        for graph in self.graphs:
            graph.reset()
        free, total = torch.cuda.mem_get_info()
        if free < total // 2:
            # What a graph had stays reserved for no one. Freeing it makes every cell wait, so not each time.
            torch.cuda.empty_cache()


def _recordable(config: RetrievalConfig) -> bool:
    """Tell whether a graph can hold the steps: not with orthogonal features or triangular systems above 512.

    Nor is the plain model recorded, whose loops over the tokens would make large graphs.
    """
    orthogonal = config.orthogonal and config.entry.feature_map == "favor"
    too_large = config.entry.rule == "schlag2021" and config.size > 256
    return config.exact_shortcuts and not orthogonal and not too_large


def _block(config: RetrievalConfig) -> int:
    """Return the steps in one graph: a divisor of every count `advance` asks for, with 5000 kernels at the most."""
    common = math.gcd(config.eval_every, config.max_steps % config.eval_every or config.eval_every)
    most = max(1, 200 // config.size) if config.entry.rule == "schlag2021" else 25
    return max(n for n in range(1, most + 1) if common % n == 0)


def train_cuda(
    configs: Sequence[RetrievalConfig], device: str, jobs: int, on_progress: OnProgress | None
) -> Iterator[tuple[RetrievalConfig, RetrievalResult]]:
    """Train on a GPU with `jobs` cells in flight."""
    place = torch.device(device)
    waiting = deque(configs)
    with torch.cuda.device(place):
        free = [torch.cuda.Stream(place) for _ in range(jobs)]
        running: list[GraphedCell] = []
        try:
            while waiting or running:
                while waiting and free:
                    cell = GraphedCell(waiting.popleft(), place, free.pop())
                    running.append(cell)
                    cell.advance()
                finished = []
                for cell in running:
                    if not cell.ready:
                        continue
                    loss = cell.loss
                    if cell.result.observe(cell.config, cell.step, loss):
                        finished.append(cell)
                    else:
                        cell.advance()
                    if on_progress is not None:
                        on_progress(cell.config, cell.result.steps, loss)
                for cell in finished:
                    running.remove(cell)
                    cell.close()
                    free.append(cell.stream)
                    cell.result.wall_s = time.perf_counter() - cell.start
                    yield cell.config, cell.result
                if not finished:
                    # The shortest block takes some milliseconds.
                    time.sleep(1e-4)
        finally:
            for cell in running:
                cell.close()
