"""The command line. PyTorch and matplotlib are imported by the commands that need them, so that help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fastweights
from fastweights.commands import evaluate, train
from fastweights.commands.data import data
from fastweights.commands.generate import generate
from fastweights.commands.reproduce import report, reproduce
from fastweights.commands.translate import translate

app = typer.Typer(
    name="fastweights",
    help="Fast weights, linear attention and the delta rule: experiments, benchmarks and facts about this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure speed and memory against rivals in the same run.", no_args_is_help=True)
app.command()(reproduce)
app.command()(report)
app.command()(data)
app.add_typer(train.app, name="train")
app.add_typer(evaluate.app, name="eval")
app.command()(generate)
app.command()(translate)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"fastweights {fastweights.__version__}")
        raise typer.Exit


@app.command()
def info(
    check: Annotated[
        bool, typer.Option("--check", help="Compare every GPU kernel with float64 on this machine; takes minutes.")
    ] = False,
) -> None:
    """Show versions, devices, and every rule, feature map and backend with what it can do here."""
    from fastweights.commands import info as command

    if not check:
        command.show()
    elif not command.check():
        raise typer.Exit(1)


@app.command()
def tour() -> None:
    """See the update rules side by side: who can overwrite one memory and keep the others? Takes seconds."""
    from fastweights.commands.tour import show

    show()


@bench.command()
def memory(
    out: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs for each number; the median is reported.")] = 5,
) -> None:
    """Chunked against the reference loop and the quadratic form on the CPU: time and peak memory."""
    from fastweights.benchmarks.memory import run

    run(out, repeats)


@bench.command()
def kernels(
    out: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes only.")] = False,
    rivals: Annotated[
        str, typer.Option(help="Of sdpa, chunked and fla; fla first tunes itself for a minute.")
    ] = "sdpa,chunked",
) -> None:
    """The GPU kernels: checked against float64, then timed beside their rivals."""
    from fastweights.benchmarks.kernels import run

    if not run(out, quick, tuple(rivals.split(","))):
        raise typer.Exit(1)


@bench.command()
def retrieval(
    out: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps for each number; the median is reported.")] = 7,
) -> None:
    """The retrieval experiments step by step: what each exact short cut gains over the plain computation."""
    from fastweights.benchmarks.retrieval import run

    run(out, repeats)


@bench.command()
def lm(
    out: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    sizes: Annotated[str, typer.Option(help="Of small, medium and tiny.")] = "small",
    models: Annotated[
        str, typer.Option(help="Of transformer, linear, delta, performer, performer-delta, dpfp, dpfp-delta and xl.")
    ] = "transformer,delta,linear,dpfp-delta,performer-delta",
    ways: Annotated[
        str,
        typer.Option(
            help="Of torch, plain, bf16, graph, compiled, fast and stock; others are compared with the first."
        ),
    ] = "plain,fast",
    corpus: Annotated[
        Path | None, typer.Option(help="A prepared corpus.", show_default="random words, as frequent as in text")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    steps: Annotated[int, typer.Option(min=1, help="Updates in each of five timed blocks.")] = 20,
    compared: Annotated[int, typer.Option(min=0, help="First losses to compare, without dropout.")] = 20,
) -> None:
    """Training the paper's language models: words a second, plain and fast, and whether both learn the same."""
    from fastweights.benchmarks.lm import run
    from fastweights.commands.training_options import input_errors

    with input_errors(ValueError, OSError):
        names = (sizes.split(","), models.split(","), ways.split(","))
        right = run(out, *names, corpus, device, steps, compared)
    if not right:
        raise typer.Exit(1)


@bench.command()
def lm_agreement(
    corpus: Annotated[Path, typer.Option(help="A prepared corpus.")],
    out: Annotated[Path | None, typer.Option(help="Write what was found to this JSON file.")] = None,
    size: Annotated[str, typer.Option(help="small, medium or tiny.")] = "small",
    model: Annotated[str, typer.Option(help="As in bench lm.")] = "delta",
    ways: Annotated[str, typer.Option(help="As in bench lm; the first is what the others should do.")] = "torch,fast",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    losses: Annotated[int, typer.Option(min=1, help="First losses to compare, without dropout.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Updates before perplexities are compared.")] = 2000,
    batch: Annotated[int | None, typer.Option(min=1, help="Segments in a step.", show_default="the size's")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="the size's")] = None,
) -> None:
    """Is the fast way of training the plain one? First losses, and validation perplexity after a short training."""
    from fastweights.benchmarks.lm_agreement import run
    from fastweights.commands.training_options import input_errors

    changes = {name: value for name, value in {"batch_size": batch, "lr": lr}.items() if value is not None}
    with input_errors(ValueError, OSError):
        right = run(out, size, model, ways.split(","), corpus, device, losses, steps, changes)
    if not right:
        raise typer.Exit(1)


@bench.command()
def stream(
    out: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    size: Annotated[str, typer.Option(help="small, medium or tiny.")] = "small",
    models: Annotated[str, typer.Option(help="Mixers of train lm that stream.")] = "delta,linear,dpfp,transformer",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    pasts: Annotated[str, typer.Option(help="Tokens read before the timed ones.")] = "256,4096,65536",
) -> None:
    """Reading word by word: the time of one more, after short and long pasts, and the memory that is held."""
    from fastweights.benchmarks.stream import run
    from fastweights.commands.device import pick_device
    from fastweights.commands.training_options import input_errors

    with input_errors(ValueError, OSError):
        run(out, size, models.split(","), pick_device(device), [int(past) for past in pasts.split(",")])


@bench.command()
def mt(
    out: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    preset: Annotated[str, typer.Option(help="big, base or tiny.")] = "base",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32 or bf16 (mixed).")] = "fp32",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs for each number; the median is reported.")] = 5,
) -> None:
    """Translation models with linear and softmax attention: training and decoding at source lengths 32, 512, 4096."""
    from fastweights.commands.device import pick_device
    from fastweights.commands.training_options import input_errors

    with input_errors(ValueError):
        from fastweights.benchmarks.translation import run
        from fastweights.common.tables import look_up
        from fastweights.models.translation_presets import PRESETS

        look_up(PRESETS, preset, "preset")
        look_up(dict.fromkeys(("fp32", "bf16")), precision, "precision")
        device = pick_device(device)
    run(out, preset, device, precision, repeats)


def main() -> None:
    """Entry point of the `fastweights` command."""
    app()
