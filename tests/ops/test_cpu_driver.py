"""The C++ backend under sanitizers, and as an ARM processor runs it: the same sources in a program of their own."""

import platform
import shutil
from dataclasses import replace

import pytest
import torch

from fastweights.ops.cpu import build
from fastweights.ops.cpu.compiler import NATIVE, NEON, find_compiler
from fastweights.ops.cpu.softmax import softmax_nll
from fastweights.ops.fused.gated_norm import gated_rms_norm, plain_norm
from fastweights.ops.fused.short_convolution import short_convolution
from fastweights.ops.normalization import smooth_l2_normalize
from tests.ops import test_cpu_step, test_fused_features, test_linear_attention_cpu
from tests.ops.calls import FAMILY, gradients, random_call, relative_error
from tests.ops.cpu_driver import Driver, build_driver
from tests.ops.test_cpu_backend import everything, expected, packed_call
from tests.ops.test_short_convolution import MARKS, plain
from tests.ops.test_short_convolution import random_call as convolution_call

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

SANITIZERS = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Call what checks an access, instead of repeating it in place: a sixth less to compile.
SANITIZERS += ("--param", "asan-instrumentation-with-call-threshold=0")
# Inputs are numbers of the dtype: of 16 bits, the incoming gradient and the result are rounded once each. In bfloat16,
# some processors round what is multiplied, too.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(1, 1, 1, 1, 1), (2, 5, 2, 3, 17), (1, 64, 3, 17, 64), (2, 70, 1, 64, 3), (1, 70, 2, 1, 1), (1, 5, 1, 64, 64)]
DECAYS = ["decay per key", "gated_delta per key", "gated_delta log", "gated_delta log per key"]
# From Debian's packages g++-aarch64-linux-gnu and qemu-user.
ARM = [shutil.which(name) for name in ("aarch64-linux-gnu-g++", "qemu-aarch64")]


@pytest.fixture
def driven(monkeypatch):
    """Lets the calls of a test run by a command."""
    drivers = []
    yield lambda *command: drivers.append(Driver(monkeypatch, *command))
    for driver in drivers:
        driver.close()


def check(call, dtype, cu_seqlens=None):
    """Compare with the reference, and one thread with three."""
    call = call.to(dtype)
    exact = expected(call.to(torch.float64), **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}))
    ours = everything(call, cu_seqlens)
    assert relative_error(ours, exact) < TOLERANCES[dtype]
    torch.set_num_threads(3)
    assert all(torch.equal(a, b) for a, b in zip(everything(call, cu_seqlens), ours, strict=True))
    torch.set_num_threads(1)


def check_convolutions():
    for dtype in TOLERANCES:
        for marks in MARKS:
            tensors, how = convolution_call(marks, C=70, dtype=dtype)
            exact = [x.detach().double().requires_grad_() for x in tensors]
            found, wanted = short_convolution(*tensors, silu=True, **how), plain(exact, True, **how)
            errors = relative_error([*found, *gradients(found, tensors)], [*wanted, *gradients(wanted, exact)])
            assert errors < TOLERANCES[dtype]


def check_norms():
    for dtype in TOLERANCES:
        tensors = [torch.randn(size).to(dtype).requires_grad_() for size in ((2, 3, 2, 37), (37,), (2, 3, 2, 37))]
        exact = [x.detach().double().requires_grad_() for x in tensors]
        found, wanted = gated_rms_norm(*tensors, "silu"), plain_norm(*exact, "silu", 1e-5, 1.0)[0]
        errors = relative_error([found, *gradients([found], tensors)], [wanted, *gradients([wanted], exact)])
        assert errors < 2 * TOLERANCES[dtype]


def check_softmax():
    """Rows longer and shorter than what is taken at once."""
    for dtype in (torch.float64, torch.float32):
        for size in (3, 1100):
            logits, targets = 5 * torch.randn(9, size, dtype=dtype), torch.randint(size, (9,))
            exact = logits.double().log_softmax(-1)
            wanted = [exact.exp(), -exact.gather(1, targets[:, None]).squeeze(1)]
            for kind in (torch.int32, torch.int64):
                assert relative_error(softmax_nll(logits.clone(), targets.to(kind)), wanted) < TOLERANCES[dtype]
    with pytest.raises(TypeError, match="float32 or float64, got"):
        softmax_nll(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))


def check_features():
    for dtype in TOLERANCES:
        for name in test_fused_features.MAPS:
            for norm in test_fused_features.NORMS if dtype == torch.float64 else (smooth_l2_normalize,):
                for R in (5, 17):
                    features, tensors = test_fused_features.make(name, norm, R), test_fused_features.heads(R, dtype)
                    exact = [x.detach().double().requires_grad_() for x in tensors]
                    found = test_fused_features.everything(
                        test_fused_features.fused, tensors, features, False, dtype, False
                    )
                    wanted = test_fused_features.everything(
                        test_fused_features.plain, exact, features, False, torch.float64, False
                    )
                    assert relative_error(found, wanted) < 2 * TOLERANCES[dtype]


def check_linear_attention():
    """By the memory and by the weights, read from what was written, with padding."""
    for dtype in TOLERANCES:
        for name in ("elu", "favor") if dtype == torch.float64 else ("dpfp",):
            for sizes in ((3, 5, 2, 17, 33), (40, 300, 1, 5, 3)):
                call = test_linear_attention_cpu.random_call(name, sizes, dtype)
                found, wanted = (
                    test_linear_attention_cpu.everything(run, call) for run in test_linear_attention_cpu.WAYS
                )
                assert relative_error(found, wanted) < 4 * TOLERANCES[dtype]
                test_linear_attention_cpu.check_state(call, 4 * TOLERANCES[dtype])


def check_steps():
    """One token or a few: every rule, maps, sequences that are packed, and states that are overwritten."""
    for rule in (*FAMILY, *DECAYS):
        for normalization in (None, "attention"):
            inputs = test_cpu_step.problem(random_call(rule, normalization, 2, 2, 3, 7, 37))
            want = test_cpu_step.expected(inputs)
            empty = replace(inputs, W=None, z=None, attention=normalization is not None)
            assert relative_error(test_cpu_step.run(empty), test_cpu_step.expected(empty)) < 1e-12
            assert relative_error(test_cpu_step.run(replace(inputs, in_place=True)), want) < 1e-12
    for phi in test_cpu_step.FEATURES.values():
        call = random_call("gated_delta", None, 2, 2, 2, 5, 18).to(torch.bfloat16)
        inputs = replace(test_cpu_step.problem(call), features=phi, W=torch.randn(2, 2, phi.size(5), 18))
        exact = [x.double() for x in (call.q, call.k, call.v)]
        wide = replace(inputs, W=inputs.W.double(), gates={name: x.double() for name, x in call.gates.items()})
        wanted = test_cpu_step.expected(replace(wide, q=exact[0], k=exact[1], v=exact[2]))
        assert relative_error(test_cpu_step.run(inputs), wanted) < 2 * TOLERANCES[torch.bfloat16]
    call, bounds = packed_call(6, [0, 1, 1, 3, 5, 6], 2, 5, 4)
    starts = torch.arange(6)[None] == 4
    inputs = test_cpu_step.problem(call, cu_seqlens=bounds, starts=starts)
    assert relative_error(test_cpu_step.run(inputs), test_cpu_step.expected(inputs)) < 1e-12


def grouped(call, group):
    return replace(call, q=call.q[:, :, ::group], k=call.k[:, :, ::group])


def test_sanitizers_find_nothing(tmp_path, driven, monkeypatch):
    program = build_driver(find_compiler(), [*NATIVE.flags, *SANITIZERS], tmp_path)
    driven(program)
    for dtype in TOLERANCES:
        for shape in SHAPES:
            for rule in (*FAMILY, *DECAYS) if dtype == torch.float64 else ("gated_delta", *DECAYS):
                check(random_call(rule, None, *shape), dtype)
        check(grouped(random_call("gated_delta", None, 2, 70, 6, 17, 3), 3), dtype)
        check(grouped(random_call("gated_delta per key", None, 1, 70, 4, 5, 17), 2), dtype)
        call, bounds = packed_call(171, [0, 0, 5, 5, 70, 71, 171, 171], 2, 17, 3)
        check(call, dtype, bounds)
    check_convolutions()
    check_norms()
    check_softmax()
    check_features()
    check_linear_attention()
    check_steps()
    # And they would: here every tensor ends a byte before the C++ is told.
    Driver(monkeypatch, program, short_by=1)
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        everything(random_call("delta"))


@pytest.mark.skipif(platform.machine() != "x86_64" or not all(ARM), reason="needs g++ for AArch64 and qemu-user")
def test_an_arm_processor_agrees_with_the_reference(tmp_path, driven):
    compiler, emulator = ARM
    driven(emulator, build_driver(compiler, [*NEON.flags, "-O0"], tmp_path, ["-static"]))
    for dtype in TOLERANCES:
        for rule in ("delta", "gated_delta log", "gated_delta per key"):
            check(random_call(rule, None, 1, 70, 2, 17, 33), dtype)
        call, bounds = packed_call(80, [0, 0, 5, 80], 2, 64, 3)
        check(call, dtype, bounds)
    check_convolutions()
    check_features()
    check_linear_attention()
    check_steps()
