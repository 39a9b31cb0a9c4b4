"""What every test stands on: one thread, fixed seeds, and NaN in all memory that nobody wrote."""

import errno
import gc
import os

import pytest
import torch
import typer
from hypothesis import settings

# That a compiler can compile for this processor's vectors is known: torch would find out by five compilations.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
settings.register_profile("fastweights", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fastweights")

# Markers of tests that run only where `-m` names them.
ON_REQUEST = {"fuzz", "every_variant"}


def pytest_collection_modifyitems(config, items):
    unasked = {marker for marker in ON_REQUEST if marker not in config.option.markexpr}
    left_out = [item for item in items if unasked & {mark.name for mark in item.iter_markers()}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    # The longest first, so that no process is left with one of them at the end.
    items.sort(key=lambda item: not item.name.startswith("test_in_the_interpreter"))
    # What is there now stays to the end: garbage need not be looked for in it, which takes half a second each time.
    gc.freeze()


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # In deterministic mode torch.empty comes filled with NaN, so an element that is never written shows.
    torch.use_deterministic_algorithms(True)
    monkeypatch.delenv("FASTWEIGHTS_BACKEND", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def closed_stdout(monkeypatch):
    """Whoever prints a line finds that nobody reads it, as after `| head -1`; errors and progress still arrive."""
    echo = typer.echo

    def closed(*arguments, err=False, **options):
        if not err:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        echo(*arguments, err=err, **options)

    monkeypatch.setattr(typer, "echo", closed)
