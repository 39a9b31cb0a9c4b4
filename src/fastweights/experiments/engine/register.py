"""The experiments that `fastweights reproduce` and `fastweights report` know."""

import importlib
import re
import sys
from pathlib import Path

from fastweights.experiments.engine.experiment import SCALES, BadInput, Experiment

EXPERIMENTS: dict[str, Experiment] = {}
"""By name, in the order of the page."""


def register_experiment(experiment: Experiment) -> Experiment:
    """Make an experiment known to `reproduce` and `report`.

    A file of your own that ends in

        register_experiment(EXPERIMENT)

    is run by `fastweights reproduce NAME --load FILE`. Its name is the name of its folder of results.
    """
    name = experiment.name
    if not re.fullmatch("[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"the name of an experiment is made of a-z, 0-9, - and _, got {name!r}")
    unknown = [scale for scale, at in experiment.scales.items() if scale not in SCALES and not at.label]
    if not experiment.scales or unknown:
        raise ValueError(
            f"the scales of {name} must be some of {', '.join(SCALES)}, got {', '.join(experiment.scales)}; "
            "a stand-in for them says what it is by its label"
        )
    if EXPERIMENTS.setdefault(name, experiment) is not experiment:
        raise ValueError(f"there already is an experiment {name!r}; choose another name")
    return experiment


def known_scales() -> list[str]:
    """Return the names of all scales, the stand-ins of experiments last."""
    return list(
        dict.fromkeys([*SCALES, *(scale for experiment in EXPERIMENTS.values() for scale in experiment.scales)])
    )


def load_experiments(path: Path) -> None:
    """Import a Python file that registers experiments; worker processes import it by the name of the file."""
    if not path.is_file():
        raise BadInput(f"there is no file {path}; --load takes a Python file that calls register_experiment")
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.import_module(path.stem)
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise BadInput(f"the module {path.stem} is already {module.__file__}; give {path} another name")
