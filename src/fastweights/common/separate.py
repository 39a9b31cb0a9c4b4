"""Calls in other processes that may crash, hang or leave a GPU unusable: they end nothing but themselves."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

Task = TypeVar("Task")


class ProcessFailed(RuntimeError):
    """The process crashed or took too long."""


class StartFailed(ProcessFailed):
    """The process crashed, failed or took too long before it could be called."""


class SeparateProcess:
    """A process that makes one call at a time; after a failure, the next call gets a new process.

    Args:
        make, arguments: what is called there is the function that `make(*arguments)` returns there.
        start_s: the time that the process may take until then.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]], *arguments: Any, start_s: float = 300.0) -> None:
        self.make, self.arguments, self.start_s = make, arguments, start_s
        self._process: Any = None
        self._ready = self._closed = False

    def start(self) -> None:
        """Start the process, if there is none, without waiting for it."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.make, self.arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False
        if self._closed:
            self._process.kill()

    def wait_until_ready(self) -> None:
        """Start the process, if there is none, and wait until it can be called."""
        self.start()
        if self._ready:
            return
        try:
            error = self._answer(self.start_s)
        except ProcessFailed as failure:
            raise StartFailed(f"a process could not start: {failure}") from None
        if error is not None:
            self.end()
            raise StartFailed(f"a process could not start: {type(error).__name__}: {error}")
        self._ready = True

    def __call__(self, *arguments: Any, limit_s: float | None = None) -> Any:
        """Return or raise what the function does; raise ProcessFailed where it does neither within the limit."""
        self.wait_until_ready()
        # A process that has just ended shows when its answer is read.
        with suppress(OSError):
            self._connection.send(arguments)
        succeeded, result = self._answer(limit_s)
        if not succeeded:
            raise result
        return result

    def _answer(self, limit_s: float | None) -> Any:
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
            reason = f"no answer in {limit_s:g} s"
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            reason = f"the process ended with {how}"
        self.end()
        raise ProcessFailed(reason)

    def end(self) -> None:
        """End the process, whatever it is doing; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def close(self) -> None:
        """End the process for good, also while another thread waits for it: that call fails."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()


def side_by_side(
    processes: Sequence[SeparateProcess],
    tasks: Sequence[Task],
    limit_s: float | None,
    can_continue: Callable[[Any], bool] = lambda result: True,
) -> Generator[tuple[Task, Any], None, None]:
    """Yield each task with the result of its call, or with the exception that it ended in, as they come.

    Args:
        processes: each makes one call at a time, and is replaced after an exception; none is left in the end.
        limit_s: the most time for a call.
        can_continue: whether the process that gave this result can be used for the next call.
    """
    idle: SimpleQueue[SeparateProcess] = SimpleQueue()
    for process in processes:
        idle.put(process)

    def call(task: Task) -> tuple[Task, Any]:
        process = idle.get()
        try:
            result = process(task, limit_s=limit_s)
        except Exception as error:
            result = error
        if isinstance(result, Exception) or not can_continue(result):
            process.end()
        idle.put(process)
        return task, result

    threads = ThreadPoolExecutor(max(1, len(processes)))
    try:
        for done in as_completed([threads.submit(call, task) for task in tasks]):
            yield done.result()
    finally:
        for process in processes:
            process.close()
        threads.shutdown(cancel_futures=True)


def _serve(connection: Connection[Any, Any], make: Callable[..., Callable[..., Any]], arguments: Sequence[Any]) -> None:
    # What libraries print is not what the command gives.
    os.dup2(2, 1)
    try:
        function = make(*arguments)
    except Exception as error:
        connection.send(error)
        return
    connection.send(None)
    # Until the other side closes: its end, or that of the process that started this one.
    with suppress(EOFError, OSError):
        while True:
            call = connection.recv()
            try:
                answer = True, function(*call)
            except Exception as error:
                answer = False, error
            connection.send(answer)
    # Destructors of a GPU's context that is gone may hang.
    os._exit(0)
