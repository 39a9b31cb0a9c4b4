"""What commands share: messages, errors, optional packages, and options with their meaning; without PyTorch."""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer

from fastweights.common.tables import look_up
from fastweights.training.engine.config import PRECISIONS as CONFIGURED

if TYPE_CHECKING:
    from fastweights.training.engine.config import Fields

# Package -> the extra that installs it.
EXTRAS = {
    "datasets": "data",
    "lightning_fabric": "train",
    "matplotlib": "experiments",
    "num2words": "mt",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "sacrebleu": "mt",
    "transformers": "hf",
}
# What --precision takes, and the name it has in a configuration.
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", **{name: name for name in CONFIGURED}}
LARGEST_SEED = 2**63 - 1


def option(help: str, default: bool | str = True, **more: Any) -> Any:
    """Return an option with its help and, where the default is decided elsewhere, what is shown for it."""
    return typer.Option(help=help, show_default=default, **more)


def flag(name: str, help: str) -> Any:
    """Return an option without a value, which has no opposite."""
    return typer.Option(f"--{name}", help=help)


Device = Annotated[str, option("auto, cpu, cuda or cuda:N.")]
AsJson = Annotated[bool, flag("json", "Print JSON on standard output, and everything else on stderr.")]


def say(message: str) -> None:
    """Print on stderr, apart from what the command gives."""
    typer.echo(message, err=True)


def print_json(value: Any) -> None:
    """Print on standard output as JSON."""
    typer.echo(as_json(value), nl=False)


def as_json(value: Any) -> str:
    """Return the text of a JSON file."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


@contextmanager
def input_errors(expected: tuple[type[Exception], ...] = (ValueError, TypeError, ImportError)) -> Iterator[None]:
    """End the command with a sentence and exit code 2 on errors of these kinds."""
    try:
        yield
    except expected as error:
        say(f"Error: {error}")
        raise typer.Exit(2) from None


@contextmanager
def interruptible(message: str = "") -> Iterator[None]:
    """End the command with exit code 130 on Ctrl-C, after a message if there is one."""
    try:
        yield
    except KeyboardInterrupt:
        if message:
            say(message)
        raise typer.Exit(130) from None


def with_fields_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each parameter of a command that is a dataclass into options of the command line, one for each field."""
    signature = inspect.signature(command, eval_str=True)
    every = signature.parameters.items()
    groups: dict[str, Any] = {name: one.annotation for name, one in every if is_dataclass(one.annotation)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in every:
        own = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else (parameter,)
        parameters += (one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own)

    @wraps(command)
    def run(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
        command(**options)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def require(*packages: str, otherwise: str = "") -> None:
    """Raise an ImportError where packages are missing; it names the extras to install, and what works without."""
    missing = [package for package in dict.fromkeys(packages) if not _installed(package)]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[package] for package in missing))
        remedy = f"pip install 'fastweights[{extras}]'" + (f", or {otherwise}" if otherwise else "")
        raise ImportError(f"this needs {', '.join(missing)}: {remedy}")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:
        # It is in `sys.modules` without a specification, or None stands there because its import is forbidden.
        return sys.modules.get(package) is not None


def pick_device(name: str) -> str:
    """Return the name of a device that is there, for one of --device."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} does not exist: this machine has {torch.cuda.device_count()} CUDA devices")
    return name


def chosen_names(table: Mapping[str, Any], text: str, what: str) -> list[str]:
    """Return the names of a list separated by commas, each of which must be in the table."""
    names = text.split(",")
    for name in names:
        look_up(table, name, what)
    return names


def check_seed(seed: int, option: str = "--seed") -> None:
    """Raise a ValueError for a seed that random generators do not take."""
    if abs(seed) > LARGEST_SEED:
        raise ValueError(f"{option} takes whole numbers up to {LARGEST_SEED}, got {seed}")


def read_settings(fields: Fields, entries: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, and the values of FIELD=VALUE with the types of their fields."""
    hints = fields.types()
    chosen = {name: value for name, value in options.items() if value is not None}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals:
            raise ValueError(f"--set takes FIELD=VALUE, got {entry!r}")
        fields.check(name)
        if name in chosen:
            raise ValueError(f"{name} is given twice: {chosen[name]!r} and {text!r}")
        chosen[name] = _value(name, text, hints[name])
    if "seed" in chosen:
        check_seed(chosen["seed"])
    if "precision" in chosen:
        chosen["precision"] = look_up(PRECISIONS, chosen["precision"], "precision")
    return chosen


def settings_of(entries: list[str]) -> dict[str, Any]:
    """Return the values of NAME=VALUE: JSON where a value can be read as JSON, text otherwise."""
    values = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not (name and equals):
            raise ValueError(f"arguments are given as NAME=VALUE, got {entry!r}")
        values[name] = _parsed(text)
    return values


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _value(name: str, text: str, hint: Any) -> Any:
    value = _parsed(text)
    if fits(value, hint):
        return value
    # A number where a name is meant is that name.
    if fits(text, hint):
        return text
    example = '3, 0.5, true, null, [1,2], {"nu":2}'
    raise ValueError(f"{name} takes {type_name(hint)}, got {text!r}; write it as in JSON: {example}")


def type_name(hint: Any) -> str:
    """Return the type of a field as it is written in Python."""
    return (hint.__name__ if isinstance(hint, type) else str(hint)).replace("NoneType", "None")


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON can stand for a field of that type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if origin is tuple:
        if not isinstance(value, list):
            return False
        expected = [inner[0]] * len(value) if Ellipsis in inner else list(inner)
        return len(value) == len(expected) and all(map(fits, value, expected))
    if origin is Mapping:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
