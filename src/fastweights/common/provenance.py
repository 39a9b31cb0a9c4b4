"""Which code, machine and library versions a result came from."""

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fastweights

PACKAGE = Path(fastweights.__file__).parent


@cache
def commit() -> str:
    """Return the git commit this package is checked out at, "+dirty" if its files differ; its version without one.

    FASTWEIGHTS_COMMIT names it where the files are a copy without their repository.
    """
    if named := os.environ.get("FASTWEIGHTS_COMMIT"):
        return named
    try:
        # A package installed into an environment inside someone else's repository is not part of that repository.
        _git("ls-files", "--error-unmatch", "__init__.py")
        head = _git("rev-parse", "HEAD")
        return head + ("+dirty" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return fastweights.__version__


def _git(*arguments: str) -> str:
    completed = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True, timeout=20)
    return completed.stdout.strip()


@cache
def hardware(device: str) -> str:
    """Return the device's name, for the CPU with the number of cores that this process may use."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {cores()} cores"


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "CPU"


@cache
def versions() -> dict[str, str]:
    """Return the versions of this library, Python, and what it computes with."""
    return {"fastweights": fastweights.__version__, "python": platform.python_version(), **installed("torch", "numpy")}


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of those of the packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def origin(device: str) -> dict[str, Any]:
    """Return which code, machine and versions a number is from that is measured on `device`."""
    return {"commit": commit(), "hardware": hardware(device), "versions": versions()}
