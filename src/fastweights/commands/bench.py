"""`fastweights bench`: speed and memory, measured against rivals in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from fastweights.benchmarks.kernels import run as run_kernels
from fastweights.benchmarks.lm import MODELS, WAYS
from fastweights.benchmarks.lm import run as run_lm
from fastweights.benchmarks.lm_agreement import run as run_lm_agreement
from fastweights.benchmarks.memory import run as run_memory
from fastweights.benchmarks.retrieval import run as run_retrieval
from fastweights.benchmarks.stream import run as run_stream
from fastweights.benchmarks.translation import run as run_mt
from fastweights.commands.options import AsJson, Device, input_errors, pick_device, require
from fastweights.common.tables import look_up
from fastweights.models.presets import PRESETS
from fastweights.models.translation_presets import PRESETS as MT_PRESETS

Out = Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.", show_default=False)]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs for each number; the median is reported.")]
Size = Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")]
Gpu = Annotated[str, typer.Option(help="cuda or cpu.")]


def memory(out: Out = None, repeats: Repeats = 5, as_json: AsJson = False) -> None:
    """Compare the backends with each other and with the quadratic form on the CPU: time and peak memory."""
    run_memory(out, repeats, as_json)


def kernels(
    out: Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure two shapes only.")] = False,
    rivals: Annotated[
        str, typer.Option(help="Rivals, from sdpa, chunked and fla; fla first tunes itself for a minute.")
    ] = "sdpa,chunked",
    as_json: AsJson = False,
) -> None:
    """Check the GPU kernels against float64, then time them beside their rivals."""
    _exit(run_kernels(out, quick, tuple(rivals.split(",")), as_json))


def retrieval(out: Out = None, repeats: Repeats = 7, as_json: AsJson = False) -> None:
    """Time a training step of the retrieval experiments with each exact shortcut and without any."""
    run_retrieval(out, repeats, as_json)


def lm(
    out: Out = None,
    sizes: Annotated[str, typer.Option(help=f"Sizes, from {', '.join(PRESETS)}.")] = "small",
    models: Annotated[
        str, typer.Option(help=f"Models, from {', '.join(MODELS)}.")
    ] = "transformer,delta,linear,dpfp-delta,performer-delta",
    ways: Annotated[
        str, typer.Option(help=f"Ways of training, from {', '.join(WAYS)}; others are compared with the first.")
    ] = "plain,fast",
    corpus: Annotated[
        Path | None, typer.Option(help="A prepared corpus.", show_default="random words, as frequent as in text")
    ] = None,
    device: Gpu = "cuda",
    steps: Annotated[int, typer.Option(min=1, help="Updates in each of five timed blocks.")] = 20,
    compared: Annotated[int, typer.Option(min=0, help="First losses to compare, without dropout.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Time the training of the paper's language models, plain and fast, and check that both learn the same."""
    with input_errors((ValueError, ImportError, OSError)):
        _check_training(device, "bench lm", "--sizes tiny --ways torch,plain")
        names = (sizes.split(","), models.split(","), ways.split(","))
        succeeded = run_lm(out, *names, corpus, device, steps, compared, as_json)
    _exit(succeeded)


def lm_agreement(
    corpus: Annotated[Path, typer.Option(help="A prepared corpus.")],
    out: Out = None,
    size: Size = "small",
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "delta",
    ways: Annotated[
        str, typer.Option(help=f"Ways of training, from {', '.join(WAYS)}; others should learn what the first learns.")
    ] = "torch,fast",
    device: Gpu = "cuda",
    losses: Annotated[int, typer.Option(min=1, help="First losses to compare, without dropout.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Updates before perplexities are compared.")] = 2000,
    batch: Annotated[int | None, typer.Option(min=1, help="Segments in a step.", show_default="the size's")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="the size's")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare fast training with plain training: the first losses, and perplexity after a short training."""
    changes = {name: value for name, value in {"batch_size": batch, "lr": lr}.items() if value is not None}
    with input_errors((ValueError, ImportError, OSError)):
        _check_training(device, "bench lm-agreement", "--size tiny --ways torch,plain")
        agreed = run_lm_agreement(out, size, model, ways.split(","), corpus, device, losses, steps, changes, as_json)
    _exit(agreed)


def stream(
    out: Out = None,
    size: Size = "small",
    models: Annotated[
        str, typer.Option(help="Models, from the mixers of `train lm` that stream.")
    ] = "delta,linear,dpfp,transformer",
    device: Device = "auto",
    pasts: Annotated[str, typer.Option(help="Tokens read before the timed ones.")] = "256,4096,65536",
    as_json: AsJson = False,
) -> None:
    """Time one more word after short and long texts, and count the bytes that are kept of them."""
    with input_errors((ValueError, OSError)):
        lengths = [int(past) for past in pasts.split(",")]
        run_stream(out, size, models.split(","), pick_device(device), lengths, as_json)


def mt(
    out: Out = None,
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(MT_PRESETS)}.")] = "base",
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time training and decoding of translation models with linear and softmax attention at three source lengths."""
    with input_errors():
        look_up(MT_PRESETS, preset, "preset")
        look_up(dict.fromkeys(("fp32", "bf16")), precision, "precision")
        device = pick_device(device)
    run_mt(out, preset, device, precision, repeats, as_json)


def _check_training(device: str, command: str, options: str) -> None:
    """Raise an error for a device or a package that training needs and that is not there."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"{command} needs a CUDA device, and PyTorch finds none here; "
            f"`fastweights {command} --device cpu {options}` measures on the CPU"
        )
    require("lightning")


def _exit(succeeded: bool) -> None:
    if not succeeded:
        raise typer.Exit(1)
