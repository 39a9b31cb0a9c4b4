"""The folder of a run: who may write to it, and whether what it holds is the run that was asked for.

OUT/config.json      the configuration, and where the run was made
OUT/log.jsonl        the log
OUT/checkpoints/     see `checkpoint`
OUT/tensorboard/     where it is installed
OUT/previous-1/      an earlier run, moved away when told to start anew
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastweights.common.files import locked, remove_stale_temporaries, write_atomically
from fastweights.training.engine.config import TrainingConfig
from fastweights.training.runs.checkpoint import list_checkpoints

FORMAT = 1
_CONTENTS = ("config.json", "log.jsonl", "log.jsonl.damaged", "checkpoints", "tensorboard", "eval")


class RunError(RuntimeError):
    """A folder that cannot be trained in as asked."""


def open_folder(
    out: Path, task: dict[str, Any], config: TrainingConfig, about: dict[str, Any], fresh: bool, held: ExitStack
) -> None:
    """Take the folder for this configuration, a new one or the run of the same that it holds, until `held` is closed.

    Raises:
        RunError: another process has it, it holds another run, or it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(out / ".lock", wait=False))
    except BlockingIOError:
        raise RunError(f"another process is training in {out}; wait for it or choose another folder") from None
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}; choose another folder") from None
    remove_stale_temporaries(out)
    path = out / "config.json"
    asked = json.loads(json.dumps({"task": task, "training": config.describe()}))
    if fresh:
        _move_away(out)
    if path.exists():
        _compare(path, asked)
    elif any(list_checkpoints(out / "checkpoints", kind) for kind in ("step", "best")):
        raise RunError(
            f"{out} holds checkpoints without their {path.name}, so that nobody can tell whether they are of "
            "this configuration; copy it back, choose another folder, or start anew (which moves them away)"
        )
    write_atomically(path, (json.dumps({"format": FORMAT, **asked, "about": about}, indent=1) + "\n").encode())


def _compare(path: Path, asked: dict[str, Any]) -> None:
    """Refuse to go on with a run of another configuration."""
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
            f"{path.parent} holds a run of another configuration:\n  "
            + "\n  ".join(differing)
            + "\nask for the same to resume it, choose another folder, or start anew (which moves it away)"
        )


def _move_away(out: Path) -> None:
    present = [out / name for name in _CONTENTS if (out / name).exists()]
    if not present:
        return
    number = 1
    while (out / f"previous-{number}").exists():
        number += 1
    aside = out / f"previous-{number}"
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
