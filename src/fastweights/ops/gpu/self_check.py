"""Are the kernels right on this GPU, with this compiler? Compared with float64 before they are first used.

Compilers of this kind have been seen to miscompile a kernel for one GPU and one configuration without a word. So each
kind of kernel runs a small problem once, and its outputs and gradients are compared with plain PyTorch in float64. The
verdict is kept on disk, by GPU, driver, torch, Triton and the source of the kernels. A kind that failed is never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.common.files import write_atomically
from fastweights.common.provenance import installed

ENVIRONMENT = "FASTWEIGHTS_SELF_CHECK"

# Relative to the norm, twice what the tests allow: a miscompilation is off by far more, and a verdict must not hang on
# the last digit.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


class Verdict(NamedTuple):
    """How far off each result was, relative to its norm; or the error that stopped the run."""

    errors: dict[str, float]
    failure: str | None = None


@dataclass(frozen=True)
class Check:
    """One kind of kernel, and how to find out whether it is right.

    Args:
        key: the name of its verdict on disk.
        kernels: what the messages call it, a plural.
        source: the file or folder with its code, for which the verdict holds.
        dtype: what it computes in; its results may be off by `LIMITS[dtype]`.
        compare: runs a small problem on a device and returns how far each result is off, by name.
        limits: other limits, for results that have them.
        instead: a sentence about what runs where it is wrong.
    """

    key: str
    kernels: str
    source: Path
    dtype: torch.dtype
    compare: Callable[[torch.device], dict[str, float]]
    limits: Mapping[str, float] = field(default_factory=dict)
    instead: str = "plain PyTorch is used instead"

    def refusal(self, device: torch.device) -> str | None:
        """Say why the kernels must not be used on `device`; checks them where nobody did before."""
        known = (device, self.source, self.key)
        try:
            return _reasons[known]
        except KeyError:
            pass
        if not _wanted(device):
            return None
        with _lock:
            verdicts = _verdicts(device, self.source)
            if self.key not in verdicts:
                if _capturing():
                    raise RuntimeError(
                        f"{self.kernels} have not been checked on this GPU, and a CUDA graph is being captured: "
                        f"run the call once before, or set {ENVIRONMENT}=0"
                    )
                self.run_again(device)
            reason = self.reason(verdicts[self.key])
            _reasons[known] = reason
        if reason is not None:
            where = ", ".join(machine(device, self.source).values())
            warnings.warn(
                f"{reason}. Machine: {where}. They will not be used here; {self.instead}. Please report this.",
                stacklevel=2,
            )
        return reason

    def reason(self, verdict: Verdict) -> str | None:
        """Say why kernels with this verdict must not be used, None if they may."""
        if verdict.failure is not None:
            return f"{self.kernels} failed their self-check: {verdict.failure}"
        usual = LIMITS[self.dtype]
        wrong = {name: error for name, error in verdict.errors.items() if not error <= self.limits.get(name, usual)}
        if not wrong:
            return None
        off = ", ".join(f"{name} by {error:.0e}" for name, error in wrong.items())
        limit = max(self.limits.get(name, usual) for name in wrong)
        return f"{self.kernels} are wrong on this machine: off {off} (limit {limit:.0e})"

    def run_again(self, device: torch.device) -> Verdict:
        """Keep a new verdict in place of an old one; but what crashed the GPU before is not tried again."""
        verdicts = _verdicts(device, self.source)
        if "CUDA error" not in (verdicts.get(self.key, Verdict({})).failure or ""):
            verdicts[self.key] = self.run(device)
            _write(device, self.source)
        return verdicts[self.key]

    def run(self, device: torch.device) -> Verdict:
        """Return how far off the kernels are now, whatever is known about them."""
        try:
            return Verdict(_undisturbed(self.compare, device))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            verdict = Verdict({}, f"{type(error).__name__}: {str(error)[:300]}")
            if "CUDA error" in str(error):
                # Nothing runs in this process any more; the next one shall know why.
                _verdicts(device, self.source)[self.key] = verdict
                _write(device, self.source)
                raise RuntimeError(f"{self.reason(verdict)}; start again, it will not be used then") from error
            return verdict


_lock = threading.RLock()
_reasons: dict[tuple[torch.device, Path, str], str | None] = {}


def _wanted(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get(ENVIRONMENT) != "0"


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _undisturbed(compare: Callable[[torch.device], dict[str, float]], device: torch.device) -> dict[str, float]:
    """Compare in a thread of its own, which has none of the caller's inference mode, autocast or transforms."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(on_stream, stream, compare, device).result()


def on_stream(stream: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in this thread, on the CUDA stream of another one (None on the CPU), without gradients."""
    with torch.cuda.stream(stream), torch.no_grad():
        return function(*arguments)


def relative_errors(names: Iterable[str], ours: Iterable[Tensor], exact: Iterable[Tensor]) -> dict[str, float]:
    """Return ||ours - exact|| / ||exact|| of each result by its name, without those that have no elements."""
    pairs = {name: (a.detach(), b.detach()) for name, a, b in zip(names, ours, exact, strict=True) if b.numel()}
    errors = torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs.values()])
    return dict(zip(pairs, errors.nan_to_num(float("inf")).tolist(), strict=True))


@cache
def machine(device: torch.device, source: Path) -> dict[str, str]:
    """Return what a verdict on the kernels in `source` holds for."""
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        driver = f"built for CUDA {torch.version.cuda}"
    shared = (Path(__file__).with_name(name) for name in ("common.py", "heads.py", "launcher.py"))
    files = [*(sorted(source.rglob("*.py")) or [source]), *shared]
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver,
        "torch": f"torch {torch.__version__}",
        "triton": f"Triton {installed('triton').get('triton', 'unknown')}",
        "source": f"kernels {code.hexdigest()[:12]}",
    }


def path(device: torch.device, source: Path) -> Path:
    """Return the file that keeps the verdicts on the kernels in `source` on `device`."""
    name = hashlib.sha256(json.dumps(machine(device, source)).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "fastweights" / "self-check" / f"{name}.json"


@cache
def _verdicts(device: torch.device, source: Path) -> dict[str, Verdict]:
    """Return the verdicts that are known, by key; what is added to them is known from then on."""
    return _read(path(device, source))


def _read(path: Path) -> dict[str, Verdict]:
    try:
        content = json.loads(path.read_text())["verdicts"]
        return {key: Verdict(dict(errors), failure) for key, (errors, failure) in content.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(device: torch.device, source: Path) -> None:
    """Keep the verdicts, beside those that other processes wrote meanwhile. Without a disk, this process knows them."""
    verdicts, file = _verdicts(device, source), path(device, source)
    verdicts.update({key: verdict for key, verdict in _read(file).items() if key not in verdicts})
    content = {"machine": machine(device, source), "verdicts": verdicts}
    try:
        write_atomically(file, json.dumps(content, indent=1).encode())
    except OSError:
        return
