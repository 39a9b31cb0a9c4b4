"""Put random small faults into the package, one at a time, and see whether the tests of the same folder notice.

    python -m tests.faults --sample 40 --seed 1

A fault turns a condition or an operator, is off by one in a constant, or drops an argument. It is made in a copy of the
repository, never in the checkout. Tests that import the faulty module run first, and the first failure ends the run.
Docstrings, annotations, error messages and branches for CUDA devices have no faults: no test could notice them here.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from tests.import_graph import module_name

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/fastweights")
FOLDERS = ("ops", "layers", "models", "training")
# Test files that run before all others are even read.
NEAREST = 4

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
# Statements and expressions in which nothing is changed: what they say is for people, or for other machines.
FOR_PEOPLE = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
CALLS_FOR_PEOPLE = ("warn", "echo", "print", "Refusal", "cast", "TypeVar")
# Keyword arguments that only look for mistakes, or say what goes without saying where there is one device.
IDLE_ARGUMENTS = ("strict", "stacklevel", "device")
ELSEWHERE = ("cuda", "TYPE_CHECKING", "capturing", "capability", "_warps", "_stages")


@dataclass(frozen=True)
class Fault:
    """A change of the node at `place`, its number in a walk through the syntax tree of the file at `path`."""

    path: Path
    place: int
    argument: int = -1
    """The argument of a call to drop, keywords after positional ones."""

    def apply(self, tree: ast.Module) -> tuple[int, str, str]:
        """Change the tree; return the line, what stood there and what stands there now."""
        node = list(ast.walk(tree))[self.place]
        before = ast.unparse(node)
        if isinstance(node, ast.Call):
            arguments = [*node.args, *node.keywords]
            dropped = arguments[self.argument]
            node.args = [x for x in node.args if x is not dropped]
            node.keywords = [x for x in node.keywords if x is not dropped]
        elif isinstance(node, ast.Compare):
            node.ops[0] = SWAPPED[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp | ast.BoolOp):
            node.op = SWAPPED[type(node.op)]()
        elif isinstance(node, ast.Constant):
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        elif isinstance(node, ast.UnaryOp):
            node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
            if isinstance(node.op, ast.Not):
                node.operand = ast.UnaryOp(ast.Not(), node.operand)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            before, node.test = ast.unparse(node.test), ast.UnaryOp(ast.Not(), node.test)
            return node.lineno, f"if {before}", f"if {ast.unparse(node.test)}"
        return node.lineno, before, ast.unparse(node)


def possible_faults(path: Path, code: str) -> Iterator[Fault]:
    """Yield every fault that could be made in a file."""
    tree = ast.parse(code)
    words = [word for word in ELSEWHERE if word in code]
    left_out = {id(inner) for node in ast.walk(tree) for part in _untouched(node, words) for inner in ast.walk(part)}
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Call):
            starred = any(isinstance(x, ast.Starred) for x in node.args)
            several = len(node.args) + len(node.keywords) > 1
            first = len(node.args) - (not starred and len(node.args) > 0)
            for i, argument in enumerate([*node.args, *node.keywords]):
                if several and i >= first and id(argument) not in left_out:
                    yield Fault(path, place, i)
        elif (
            isinstance(node, ast.BoolOp | ast.If | ast.IfExp | ast.While)
            or (isinstance(node, ast.Compare) and len(node.ops) == 1)
            # A list that is joined with another is no arithmetic.
            or (isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not isinstance(node.left, ast.List))
            or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub))
            or (isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float))
        ):
            yield Fault(path, place)


def _untouched(node: ast.AST, elsewhere: list[str]) -> Iterator[ast.AST]:
    """Yield the parts of a node in which nothing is changed; the words are those of other machines in its file."""
    if isinstance(node, FOR_PEOPLE) or (
        isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CALLS_FOR_PEOPLE
    ):
        yield node
    elif isinstance(node, ast.FunctionDef):
        yield from (part for part in (node.returns, *node.decorator_list) if part is not None)
        if node.name in ("__repr__", "__str__", "extra_repr"):
            yield node
    elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    elif isinstance(node, ast.ClassDef):
        yield from node.decorator_list
    elif isinstance(node, ast.keyword) and node.arg in IDLE_ARGUMENTS:
        yield node
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        if any(word in ast.unparse(node.test) for word in elsewhere):
            yield node
    elif isinstance(node, ast.expr | ast.Assign | ast.Return) and any(word in ast.unparse(node) for word in elsewhere):
        yield node


def sample(count: int, seed: int, folders: tuple[str, ...] = FOLDERS) -> list[Fault]:
    """Draw faults from all that are possible, the same for the same seed and source."""
    return random.Random(seed).sample(_every_fault(folders), count)


@cache
def _every_fault(folders: tuple[str, ...]) -> list[Fault]:
    paths = [path for folder in folders for path in sorted((ROOT / SOURCE / folder).rglob("*.py"))]
    return [
        fault
        for path in paths
        if "cuda" not in path.stem
        for fault in possible_faults(path.relative_to(ROOT), path.read_text())
    ]


def test_files(path: Path) -> list[str]:
    """Return the test files of the folder of a module, and others that import it: the nearest first."""
    module = module_name(ROOT / path, ROOT / SOURCE)
    packages = [module, *(module.rsplit(".", i)[0] for i in range(1, module.count(".") - 1))]
    ours = ROOT / "tests" / path.relative_to(SOURCE).parts[0]
    ranked = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        code = file.read_text()
        distance = next(
            (i for i, name in enumerate(packages) if name in code or _imported(name) in code), len(packages)
        )
        if ours in file.parents or distance < len(packages):
            other_name = module.rpartition(".")[2].split("_")[0] not in file.stem
            ranked.append((distance, other_name, ours not in file.parents, len(code), str(file.relative_to(ROOT))))
    return [name for *_, name in sorted(ranked)]


def _imported(module: str) -> str:
    package, _, name = module.rpartition(".")
    return f"from {package} import {name}"


@dataclass(frozen=True)
class Verdict:
    """What came of a fault: "noticed" by a test, "missed" by all, or "no time" to run them all."""

    outcome: str
    words: str
    test: str = ""
    in_interpreter: bool = False


class Copy:
    """A copy of the repository, in which one fault at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in tracked.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def judge(self, fault: Fault, limit: int) -> Verdict:
        """Run the tests with the fault, each time for at most `limit` seconds of a processor."""
        file = self.folder / fault.path
        original = file.read_text()
        tree = ast.parse(original)
        line, before, after = fault.apply(tree)
        words = f"{fault.path}:{line}: {' '.join(before.split())[:100]}  ->  {' '.join(after.split())[:100]}"
        file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        try:
            return self._judge(fault.path, words, limit)
        finally:
            file.write_text(original)

    def _judge(self, path: Path, words: str, limit: int) -> Verdict:
        files = test_files(path)
        nearest, others = files[:NEAREST], files[NEAREST:]
        if "gpu" in path.parts:
            # What the slow tests would start in processes of their own.
            interpreted = [name for name in files if "interpreted import" in (ROOT / name).read_text()]
            compiled = [name for name in files if name.endswith("_aot.py")]
            runs = [(interpreted[:NEAREST], True, ""), (interpreted[NEAREST:], True, "")]
            runs += [(files, False, "not slow"), (compiled, False, "slow")]
        else:
            runs = [(nearest, False, "not slow"), (others, False, "not slow"), (files, False, "slow")]
        for names, in_interpreter, marker in runs:
            run = self.pytest(["-x", "-m", marker, *names], in_interpreter, limit) if names else None
            if run is not None and run.returncode == -signal.SIGXCPU:
                return Verdict("no time", words)
            if run is not None and run.returncode not in (0, 5):
                failed = re.search(r"^FAILED (\S+::.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
                return Verdict("noticed", words, failed[1] if failed else "", in_interpreter)
        return Verdict("missed", words)

    def pytest(self, arguments: list[str], in_interpreter: bool, limit: int) -> subprocess.CompletedProcess[str]:
        """Run pytest on the package of the copy, for at most `limit` seconds of a processor."""
        environment = {
            **os.environ,
            **{"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            **{"TRITON_CACHE_DIR": str(self.folder / "triton"), "TRITON_INTERPRET": str(int(in_interpreter))},
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        # The soft limit, which ends a run by the signal that says so; at the hard one it is killed.
        limited = ["sh", "-c", f'ulimit -S -t {limit} && exec "$@"', "sh", *command]
        return subprocess.run(limited, cwd=self.folder, env=environment, capture_output=True, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=40, help="faults to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", nargs="+", default=FOLDERS, choices=FOLDERS)
    parser.add_argument("--limit", type=int, default=300, help="seconds of a processor for one run of tests")
    parser.add_argument("--jobs", type=int, default=2, help="faults to try side by side")
    options = parser.parse_args()
    faults = sample(options.sample, options.seed, tuple(options.folders))
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for i in range(options.jobs):
            copies.put(Copy(Path(scratch) / str(i)))

        def judge(fault: Fault) -> Verdict:
            place = copies.get()
            try:
                return place.judge(fault, options.limit)
            finally:
                copies.put(place)

        for verdict in pool.map(judge, faults):
            verdicts.append(verdict)
            print(f"{verdict.outcome:8} {verdict.words}  {verdict.test}", flush=True)
        copy = copies.get()
        for in_interpreter in (False, True):
            tests = {x.test for x in verdicts if x.test and x.in_interpreter == in_interpreter}
            run = copy.pytest(sorted(tests), in_interpreter, 10 * options.limit) if tests else None
            if run is not None and run.returncode != 0:
                sys.exit(f"these fail without any fault, so what they noticed does not count:\n{run.stdout[-3000:]}")
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), f"of {len(faults)}")


if __name__ == "__main__":
    main()
