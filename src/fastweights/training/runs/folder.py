"""The folder of a run: who may write to it, and whether what it holds is the run that was asked for.

OUT/config.json      the configuration, and where the run was made
OUT/log.jsonl        the log
OUT/checkpoints/     see `checkpoint`
OUT/tensorboard/     where it is installed
OUT/previous-1/      an earlier run, moved away when told to start anew
"""

import json
from pathlib import Path
from typing import IO, Any

from fastweights.common.files import remove_stale_temporaries, write_atomically
from fastweights.training.engine.config import TrainingConfig
from fastweights.training.runs.checkpoint import list_checkpoints

FORMAT = 1
_CONTENTS = ("config.json", "log.jsonl", "log.jsonl.damaged", "checkpoints", "tensorboard", "eval")


class RunError(RuntimeError):
    """A folder that cannot be trained in as asked."""


class RunFolder:
    """`out`, opened by the first process of a run; closed, or freed by the system when the process dies."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._lock: IO[str] | None = None

    def open(self, task: dict[str, Any], config: TrainingConfig, about: dict[str, Any], fresh: bool) -> None:
        """Take the folder for this configuration: a new one, or the run of the same that it holds."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise RunError(f"cannot write to {self.out}: {error.strerror}; choose another folder") from None
        remove_stale_temporaries(self.out)
        path = self.out / "config.json"
        asked = json.loads(json.dumps({"task": task, "training": config.describe()}))
        if fresh:
            self._move_away()
        if path.exists():
            self._compare(path, asked)
        elif any(list_checkpoints(self.out / "checkpoints", kind) for kind in ("step", "best")):
            raise RunError(
                f"{self.out} holds checkpoints without their {path.name}, so that nobody can tell whether they are of "
                "this configuration; copy it back, choose another folder, or start anew (which moves them away)"
            )
        write_atomically(path, (json.dumps({"format": FORMAT, **asked, "about": about}, indent=1) + "\n").encode())

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        try:
            import fcntl
        except ImportError:
            return
        self._lock = (self.out / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RunError(f"another process is training in {self.out}; wait for it or choose another folder") from None

    def _compare(self, path: Path, asked: dict[str, Any]) -> None:
        try:
            stored = json.loads(path.read_text())
            known = stored["format"] == FORMAT
            before = _flat({"task": stored["task"], "training": stored["training"]}) if known else {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is not the configuration of a run ({error!r}); choose another folder") from None
        if not known:
            raise RunError(f"{path} has format {stored['format']!r}, this version reads format {FORMAT}")
        now = _flat(asked)
        free = {f"training.{name}" for name in TrainingConfig.free()}
        names = sorted((before.keys() | now.keys()) - free)
        absent = object()
        differing = [
            f"{name}: {_show(before.get(name, absent))} there, {_show(now.get(name, absent))} asked for"
            for name in names
            if before.get(name, absent) != now.get(name, absent)
        ]
        if differing:
            raise RunError(
                f"{self.out} holds a run of another configuration:\n  "
                + "\n  ".join(differing)
                + "\nask for the same to resume it, choose another folder, or start anew (which moves it away)"
            )

    def _move_away(self) -> None:
        present = [self.out / name for name in _CONTENTS if (self.out / name).exists()]
        if not present:
            return
        number = 1
        while (self.out / f"previous-{number}").exists():
            number += 1
        aside = self.out / f"previous-{number}"
        aside.mkdir()
        for path in present:
            path.replace(aside / path.name)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    named = [_flat(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items()]
    return {name: item for part in named for name, item in part.items()}


def _show(value: Any) -> str:
    return "nothing" if type(value) is object else json.dumps(value)
