"""The command line: a table of commands, each of which is imported when it is called, so that help comes at once."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import fastweights

GROUPS = {
    "train": "Train a model; the same command resumes a run that was stopped.",
    "eval": "Evaluate a trained model.",
    "export": "Write a trained model for others to use.",
    "bench": "Measure speed and memory beside rivals in the same run.",
}
# Name -> "module:function" in this package, and its line in the list of commands.
COMMANDS = {
    "data": ("commands.data:data", "Prepare a corpus for training."),
    "train lm": ("commands.train:lm", "Train a language model."),
    "train mt": ("commands.train:mt", "Train a translation model."),
    "eval lm": ("commands.evaluate:lm", "Measure the perplexity of a language model."),
    "eval mt": ("commands.evaluate:mt", "Measure the BLEU score of a translation model."),
    "generate": ("commands.generate:generate", "Continue a prompt with a trained language model."),
    "look": ("look.command:look", "Write a page that shows a language model's memory while it reads."),
    "translate": ("commands.translate:translate", "Translate lines of text with a trained translation model."),
    "export hf": ("commands.export:hf", "Write a folder for Hugging Face's transformers."),
    "export onnx": ("commands.export:onnx", "Write an ONNX file, with the state as input and output."),
    "export run": ("commands.export:run", "Write a compact folder for others to use, with a card."),
    "reproduce": ("commands.reproduce:reproduce", "Train the models behind the paper's figures and tables."),
    "report": ("commands.reproduce:report", "Draw plots and the results page from existing results."),
    "bench memory": ("benchmarks.memory:run", "Compare the memory on the CPU with other libraries and with GEMM."),
    "bench kernels": ("benchmarks.kernels.command:run", "Check the GPU kernels and time them beside their rivals."),
    "bench retrieval": ("benchmarks.retrieval:run", "Time the exact shortcuts of the retrieval experiments."),
    "bench lm": ("benchmarks.lm:run", "Time the training of language models, plain and fast."),
    "bench lm-agreement": (
        "benchmarks.lm_agreement:run",
        "Check that fast training learns what plain training learns.",
    ),
    "bench stream": ("benchmarks.stream:run", "Time a stream of words after short and long texts."),
    "bench states": ("benchmarks.states:run", "Measure streams whose state is kept in fewer bits."),
    "bench mt": ("benchmarks.translation:run", "Time translation models with linear and softmax attention."),
    "bench transformers": (
        "benchmarks.transformers:run",
        "Time models of transformers with our operators and with its own.",
    ),
    "verify": ("commands.verify:verify", "Check a kernel for linear attention or a delta rule against float64."),
    "info": ("commands.info:info", "Show versions, devices, update rules, feature maps and backends."),
    "tour": ("commands.tour:tour", "See the update rules side by side, in seconds."),
}


class LazyCommand(TyperCommand):
    """A command whose function is imported when it is called."""

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self.target = target

    def load(self) -> Any:
        """Import the function and return the command with its arguments and options."""
        module, function = self.target.split(":")
        loaded = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        loaded.command(self.name)(getattr(import_module(f"fastweights.{module}"), function))
        return typer.main.get_command(loaded)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        return self.load().make_context(*arguments, **options)


class CommandTable(TyperGroup):
    """The commands of the table, in their groups."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for path, (target, summary) in COMMANDS.items():
            *parents, name = path.split()
            group: TyperGroup = self
            for parent in parents:
                if parent not in self.commands:
                    self.add_command(TyperGroup(name=parent, help=GROUPS[parent], no_args_is_help=True))
                group = self.commands[parent]  # type: ignore[assignment]
            group.add_command(LazyCommand(name, target, summary))


app = typer.Typer(
    name="fastweights",
    cls=CommandTable,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Fast weights, linear attention and the delta rule: train, inspect, measure and reproduce."""
    if version:
        typer.echo(f"fastweights {fastweights.__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `fastweights` command."""
    app()
