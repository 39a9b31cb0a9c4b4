"""The faults that `tests/faults.py` draws: where they may be, and that each changes what the code does."""

import ast
from pathlib import Path

from tests import faults

CODE = '''
"""Version 1: not 2."""

def f(x: "a < b", n: int = 3, *, fast: bool = False) -> "1 + 1":
    """At least 1 of n + 1."""
    if x < 0 and not fast:
        raise ValueError(f"x must be at least {0 + 0}, got " + str(x - 1))
    if x.is_cuda:
        return x * 7
    return g(x, -n, keep=True) + 1
'''


def changes(code: str) -> list[tuple[str, str]]:
    """What each possible fault turns into what."""
    return [fault.apply(ast.parse(code))[1:] for fault in faults.possible_faults(Path("f.py"), code)]


def test_every_kind_of_fault():
    assert sorted(changes(CODE)) == sorted(
        [
            ("3", "4"),
            ("False", "True"),
            ("if x < 0 and (not fast)", "if not (x < 0 and (not fast))"),
            ("x < 0 and (not fast)", "x < 0 or not fast"),
            ("x < 0", "x <= 0"),
            ("0", "1"),
            ("not fast", "not not fast"),
            ("g(x, -n, keep=True)", "g(x, keep=True)"),
            ("g(x, -n, keep=True)", "g(x, -n)"),
            ("-n", "+n"),
            ("True", "False"),
            ("g(x, -n, keep=True) + 1", "g(x, -n, keep=True) - 1"),
            ("1", "2"),
        ]
    )


def test_a_sample_is_the_same_for_the_same_seed_and_compiles():
    drawn = faults.sample(30, seed=5)
    assert drawn == faults.sample(30, seed=5) != faults.sample(30, seed=6)
    for fault in drawn:
        tree = ast.parse((faults.ROOT / fault.path).read_text())
        before = ast.dump(tree)
        fault.apply(tree)
        assert ast.dump(tree) != before
        compile(ast.fix_missing_locations(tree), str(fault.path), "exec")


def test_the_nearest_tests_run_first():
    first, *others = faults.test_files(faults.SOURCE / "training/engine/optim.py")
    assert first == "tests/training/engine/test_optim.py"
    assert "tests/training/runs/test_log.py" in others


def test_a_fault_is_made_in_a_copy_only(tmp_path, monkeypatch):
    """A condition that is turned is seen by a test of it, and nothing of it stays behind."""
    path = Path("src/fastweights/ops/rules.py")
    copy = object.__new__(faults.Copy)
    copy.folder = tmp_path
    (tmp_path / path).parent.mkdir(parents=True)
    original = "def positive(x):\n    return x > 0\n"
    (tmp_path / path).write_text(original)
    (tmp_path / "test_positive.py").write_text(
        "def test_zero():\n    from fastweights.ops import rules\n    assert not rules.positive(0)\n"
    )
    monkeypatch.setattr(faults, "test_files", lambda path: ["test_positive.py"])
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    (turned,) = (x for x in faults.possible_faults(path, original) if x.apply(ast.parse(original))[1] != "0")
    verdict = copy.judge(turned, limit=60)
    assert (verdict.outcome, verdict.test) == ("noticed", "test_positive.py::test_zero")
    assert verdict.words.endswith("rules.py:2: x > 0  ->  x >= 0")
    assert (tmp_path / path).read_text() == original
