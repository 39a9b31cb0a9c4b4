"""Files whose tests run in Triton's interpreter: it is chosen when Triton is imported, so in a process of their own."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastweights.ops.eager import is_eager
from fastweights.ops.features import PLAIN
from fastweights.ops.gpu.memory.autograd import walk
from fastweights.ops.gpu.memory.signatures import WalkSignature
from fastweights.ops.gpu.memory.variants import FusedWalk, SplitWalk, Variant, configuration, may_go_by_token

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="test_in_the_interpreter.py runs it, with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="this is that process")


def rerun(*files: str | Path) -> None:
    """Run the tests of some files with the interpreter."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout=280", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=Path(files[0]).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout


def recurrence(q, k, v, a, e, w, W, cu_seqlens, dtype, features=PLAIN, config=None):
    """The recurrence on the kernels of a variant, or of the shipped one, as `ops.family.Recurrence` has it."""
    tied = e is not None and e is w
    if config is None:
        H, D, M = q.shape[2], features.size(q.shape[3]), v.shape[3]
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        by_token = may_go_by_token(a is not None, H, D, M)
        config = configuration(D, M, q.dtype, N * H, q.shape[1], features, by_token)
    kind = WalkSignature.of(q, v, (a, e, None if tied else w), tied, cu_seqlens, config, features)
    return walk(kind, is_eager(q, k, v, a, e, w, W, cu_seqlens))(q, k, v, a, e, w, W, cu_seqlens, dtype)


def as_fused(row: SplitWalk) -> FusedWalk:
    """The same, but every gradient in the walk back."""
    return FusedWalk(**{field.name: getattr(row, field.name) for field in fields(FusedWalk)})


def altered(variant: Variant, **changes: Any) -> Variant:
    """With those of the changes that its kind has a field for."""
    names = {field.name for field in fields(variant)}
    return replace(variant, **{name: value for name, value in changes.items() if name in names})


def patch_once_a_launch() -> None:
    """Have the interpreter patch Triton's language once a launch, not at every call of one device function by another.

    Those calls find it patched already, and doing it again takes more than half of the interpreter's time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function):
        modules = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if modules in patched:
            return None
        patched.add(modules)
        return patch(function)

    def launch_anew(self, *arguments, **options):
        patched.clear()
        return launch(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def refuse_foreign_addresses() -> None:
    """Have the interpreter refuse to load or store outside of the memory of a launch's tensors.

    On a GPU that is an illegal memory access, after which no call of the process works any more.
    """
    from triton.runtime import interpreter

    native, take = interpreter._interpreter, interpreter.GridExecutor._init_args_hst
    memory: list[np.ndarray] = []

    def flat(arguments):
        for x in arguments:
            if isinstance(x, tuple):
                yield from flat(x)
            elif isinstance(x, torch.Tensor):
                yield x.untyped_storage()

    def take_and_note(self, arguments, named):
        taken = take(self, arguments, named)
        ranges = sorted((x.data_ptr(), x.data_ptr() + x.nbytes()) for x in flat((*taken[0], *taken[1].values())))
        memory[:] = [np.array(side, dtype=np.uint64) for side in zip(*ranges, strict=True)]
        return taken

    def check(addresses, mask, size):
        begins, ends = memory
        used = np.asarray(addresses)[np.asarray(mask, dtype=bool)]
        nearest = np.searchsorted(begins, used, side="right")
        inside = (nearest > 0) & (used + np.uint64(size) <= np.maximum.accumulate(ends)[nearest - 1])
        assert inside.all(), f"{(~inside).sum()} of {used.size} addresses are in no tensor of the launch"

    class Checked:
        def __getattr__(self, name):
            return getattr(native, name)

        def load(self, addresses, mask, other, dtype):
            check(addresses, mask, np.dtype(dtype).itemsize)
            return native.load(addresses, mask, other, dtype)

        def store(self, addresses, values, mask):
            check(addresses, mask, values.dtype.itemsize)
            return native.store(addresses, values, mask)

    interpreter._interpreter, interpreter.GridExecutor._init_args_hst = Checked(), take_and_note


def check_overflow_by_numpy() -> None:
    """Have the interpreter look for integers that overflow in three operations of numpy, in place of ten of its own.

    They took a quarter of its time, and what they found counted only in debug mode. Looking up the dtype of numpy for
    each result took another eighth.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    known, look_up = {}, interpreter._get_np_dtype

    def dtype_of(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self, a, b, operation):
        kind = a.type.scalar
        # Unsigned numbers are meant to wrap around, as those of a random generator do.
        if kind.is_int_signed() and kind.int_bitwidth < 64:
            exact = operations[operation.__name__](a.handle.data, b.handle.data, dtype=np.int64)
            inside = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert inside, f"{kind} overflows in {operation.__name__}"

    TritonSemantic.binary_op_sanitize_overflow_impl = check
    interpreter._get_np_dtype = dtype_of


def work_out_types_once() -> None:
    """Have Triton work out what follows from a type when it first meets it, not again for every tensor.

    That took a third of the interpreter's time.
    """
    from triton.language import core

    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_tensors: dict[str, dict[str, Any]] = {}

    def block(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self, handle, type):
        if type.name not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[type.name] = vars(self).copy()
        vars(self).update(of_tensors[type.name])
        self.handle = handle

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def match_operands_once() -> None:
    """Have Triton find out once what operands of two types become, and a number beside a type.

    Half of the interpreter's time went into that. numpy spreads one operand over the other by itself.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    match, unwrap = TritonSemantic.binary_op_type_checking_impl, core._unwrap_if_constexpr
    numbers: dict[tuple[Any, ...], Any] = {}
    shapes: dict[tuple[Any, ...], Any] = {}
    simple = {core.tensor, core.dtype, int, float, bool, str, type(None)}

    def shaped(x, kind):
        return x if x.type.name == kind.name else core.tensor(x.handle, kind)

    def match_new(self, a, b, *how):
        if type(a) is type(b) is core.tensor:
            key = (a.type.name, b.type.name, *how)
            if key in shapes:
                return shaped(a, shapes[key][0]), shaped(b, shapes[key][1])
            matched = match(self, a, b, *how)
            if all(x.type.scalar == y.type.scalar for x, y in zip(matched, (a, b), strict=True)):
                shapes[key] = [x.type for x in matched]
            return matched
        if type(a) is core.tensor and type(b) in (int, float):
            key = (a.type.name, type(b), b, *how)
            if key in numbers:
                return a, numbers[key]
            matched = match(self, a, b, *how)
            if matched[0] is a:
                matched[1].handle.data.flags.writeable = False
                numbers[key] = matched[1]
            return matched
        return match(self, a, b, *how)

    TritonSemantic.binary_op_type_checking_impl = match_new
    core._unwrap_if_constexpr = lambda x: x if type(x) in simple else unwrap(x)


def call_builtins_directly() -> None:
    """Have the interpreter call Triton's functions without looking through their arguments for its own."""
    from triton.runtime import interpreter

    def patch(place, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def call(*arguments, **options):
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch


if INTERPRETED:
    from tests.ops import interpreted_gluon

    patch_once_a_launch()
    work_out_types_once()
    refuse_foreign_addresses()
    check_overflow_by_numpy()
    match_operands_once()
    call_builtins_directly()
    sys.modules["fastweights.ops.gpu.memory.kernels.gluon"] = interpreted_gluon


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody wrote reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
