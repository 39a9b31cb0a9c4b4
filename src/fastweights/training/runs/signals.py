"""Ctrl-C and SIGTERM ask a run to stop; they do not tear it apart."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """A run that was asked to stop and has saved its state; as an exit, with the code 128 + signal.

    Attributes:
        step: updates made.
        checkpoint: where the run resumes.
    """

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        super().__init__(128 + number)
        self.step, self.checkpoint = step, checkpoint


class Signals:
    """Notes the first signal in `received`, 0 until then. A second one acts as it would without this class."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python hands signals to the main thread alone; in another thread they are not ours to catch.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _WATCHED}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
