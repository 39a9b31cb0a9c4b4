"""Every shipped launch configuration compiles, without a GPU, and fits in shared memory.

Every row of the tables is lowered once, forward and back, up to where the compiler knows what it takes of shared
memory, and the largest of each dtype down to machine code. The most demanding rows are also lowered with all that a
call can have. `pytest -m every_variant` compiles the product of rows, options and architectures, which takes minutes.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights.ops.features import PLAIN, Features
from fastweights.ops.gpu.memory.variants import (
    TABLE,
    ChunkedWalk,
    RecurrentWalk,
    SplitWalk,
    Variant,
    configuration,
    holds_features,
    per_key_candidates,
    plain_rows,
)

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton._C.libtriton import ir, nvidia, passes  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptx_version_from_options  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from fastweights.ops.gpu import launcher  # noqa: E402
from fastweights.ops.gpu.memory import grouped as walks  # noqa: E402
from fastweights.ops.gpu.memory import plan as launch  # noqa: E402
from fastweights.ops.gpu.memory import step, tail  # noqa: E402
from fastweights.ops.gpu.memory.kernels import recurrent_backward as token_backward  # noqa: E402
from fastweights.ops.gpu.memory.kernels import recurrent_forward as token_forward  # noqa: E402

# Bytes of shared memory that one block may ask for.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
KERNELS = (
    *("prepare_chunks", "walk_forward", "walk_backward", "chunk_gradients", "key_decay_gradients", "scan_groups"),
    *("walk_tokens_forward", "walk_tokens_backward", "clear_tail"),
)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def name(dtype: torch.dtype, *more: Any) -> str:
    return "-".join([str(dtype)[6:], *map(str, more)])


ROWS = [
    pytest.param(dtype, D, M, row, id=name(dtype, f"{D}x{M}", *(["tokens"] if isinstance(row, RecurrentWalk) else [])))
    for dtype, D, M, row in plain_rows()
    if dtype != torch.float64
]
GROUPED = [
    pytest.param(torch.bfloat16, D, D, configuration(D, D, torch.bfloat16, 16, 4096), id=f"bfloat16-{D}x{D}-grouped")
    for D in (16, 128)
]
# One token in bfloat16 has rows of another dtype.
ONE = [
    pytest.param(torch.bfloat16, D, M, configuration(D, M, torch.bfloat16, 999, 1), id=f"bfloat16-{D}x{M}-one-token")
    for D, M in TABLE[torch.float16]
]


def largest(rows: list[Any]) -> list[Any]:
    """The last row of each kind for each dtype: tables begin with the smallest."""
    return list({(row.values[0], type(row.values[3])): row for row in rows}.values())


# The last one takes the most shared memory.
DEMANDING = [*largest(ROWS), *(row for row in ROWS if row.id == "bfloat16-256x256")]
MAPPED = [
    pytest.param(dtype, T, d, Features.named(phi, nu, True, True), id=name(dtype, T, d, phi, nu))
    for dtype, T in ((torch.bfloat16, 256), (torch.bfloat16, 1), (torch.float16, 256), (torch.float32, 256))
    for d, phi, nu in ((16, "elu", 0), (32, "elu", 0), (16, "dpfp", 1), (16, "dpfp", 3), (32, "dpfp", 3))
    # Half a minute of compiling: float32 has its products in three.
    if (dtype, d, nu) != (torch.float32, 32, 3)
]
# In bfloat16 one has a row of its own, the other is walked back in one launch.
MAPPED += [
    pytest.param(torch.bfloat16, 256, d, Features.named("dpfp", nu, True, True), id=f"bfloat16-256-{d}-dpfp-{nu}")
    for d, nu in ((16, 2), (32, 1))
]
# Every row that is for mapped keys alone, every way in which such a row follows from another, and what takes the most
# memory.
ONCE_MAPPED = ["bfloat16-256-32-elu-0", "bfloat16-256-16-dpfp-2", "float32-256-16-elu-0"]
ONCE_MAPPED += ["bfloat16-256-16-dpfp-3", "bfloat16-256-32-dpfp-3", "float16-256-16-dpfp-1", "bfloat16-1-32-dpfp-3"]


def grouped(config: Variant) -> bool:
    return isinstance(config, ChunkedWalk) and config.groups > 0


class Recorder:
    """Stands where a kernel stands in `launch` and notes what it is called with."""

    def __init__(self, kernel: Any, calls: list[Any]) -> None:
        self.kernel, self.calls, self.arg_names = kernel, calls, kernel.arg_names

    def __getitem__(self, grid: tuple[int]) -> Any:
        def note(*arguments: Any, **options: Any) -> None:
            self.calls.append((self.kernel, arguments, options))

        return note

    def warmup(self, *arguments: Any, grid: tuple[int], **options: Any) -> None:
        self.calls.append((self.kernel, arguments, options))


def launches(
    monkeypatch: Any,
    dtype: torch.dtype,
    D: int,
    M: int,
    config: Variant,
    gated: bool,
    features: Features = PLAIN,
    tied: bool = True,
    per_key: bool = False,
) -> list[Any]:
    """What the launch code calls for the delta rule, or for packed sequences of the gated delta rule.

    Walks token by token have no decay: packed sequences of the delta rule.

    With attention normalisation its gates are not `tied`: what is erased is divided.
    """
    calls: list[Any] = []
    monkeypatch.setattr(launcher, "_planned", {})
    homes = {
        "clear_tail": tail,
        "scan_groups": walks,
        "walk_tokens_forward": token_forward,
        "walk_tokens_backward": token_backward,
    }
    for name in KERNELS:
        home = homes.get(name, launch)
        monkeypatch.setattr(home, name, Recorder(getattr(home, name), calls))

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    B, T, H = 1 if gated else 2, (4096 if grouped(config) else 256), 8
    q, k, v = tensor(B, T, H, D), tensor(B, T, H, D), tensor(B, T, H, M)
    a, e = (tensor(B, T, H, *more, dtype=torch.float32) for more in ((D,) * per_key, ()))
    gates = (a if gated and not isinstance(config, RecurrentWalk) else None, e, None if tied else e)
    bounds = tensor(4, dtype=torch.int32) if gated else None
    W = tensor(3 if gated else B, H, features.size(D), M, dtype=torch.float32)
    tokens = (q, k, v, *gates)
    plan = walks.plan_walks(tokens, bounds, dtype, True, tied, config, features)
    y, W_end, *kept = plan.forward(tokens, W, bounds, True)
    plan.backward(tokens, y, W_end if gated else None, kept, bounds, True)
    return calls


def specialised(call: Any) -> tuple[Any, ...]:
    """What decides which kernel is compiled for a launch."""
    kernel, arguments, options = call

    def kind(value: Any) -> Any:
        return tuple(map(kind, value)) if isinstance(value, tuple) else getattr(value, "dtype", value)

    pairs = zip(kernel.params, arguments, strict=True)
    kinds = ["number" if parameter.do_not_specialize else kind(value) for parameter, value in pairs]
    return kernel, kinds, options


@pytest.mark.parametrize("gated", [False, True, "per key"], ids=["delta", "gated-packed", "per-key"])
@pytest.mark.parametrize(("dtype", "D", "M", "config"), ROWS + GROUPED)
def test_what_is_compiled_ahead_is_what_runs(monkeypatch, dtype, D, M, config, gated):
    per_key = gated == "per key"
    if per_key:
        (config,) = per_key_candidates(D, M, dtype, 4096)
    calls = launches(monkeypatch, dtype, D, M, config, bool(gated), per_key=per_key)
    run = [specialised(call) for call in calls]
    walk, *_ = launcher._planned.values()
    for back in (False, True):
        calls.clear()
        for one in walk.launches(back):
            one.compile()
        ahead = [specialised(call) for call in calls]
        assert ahead and all(call in run for call in ahead)
        assert any(kernel.__name__ in ("walk_backward", "walk_tokens_backward") for kernel, *_ in ahead) is back
    # What links groups is compiled when it is needed.
    assert (grouped(config) and not gated) or len(ahead) == len(run)


def test_compiled_ahead_once_and_not_in_a_graph(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(launch, "side_by_side", asked.append)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    # Nothing is compiled for tensors that are not on a GPU.
    for index, capturing, times in ((None, False, 0), (0, True, 0), (0, False, 1)):
        launches(monkeypatch, torch.bfloat16, 64, 64, TABLE[torch.bfloat16][64, 64], gated=False)
        (walk,) = launcher._planned.values()
        walk.device = torch.device("meta") if index is None else torch.device("cuda", index)
        walk.compiled_ahead = False
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", partial(bool, capturing))
        for _ in range(2):
            walk.compile_ahead(True)
            assert len(asked) == times


def source_of(call: Any) -> Any:
    """A recorded launch, specialised as the launcher would."""
    kernel, arguments, _ = call
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    divisible = {}

    def kind(value: Any, path: tuple[int, ...], parameter: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(x, (*path, i), parameter) for i, x in enumerate(value))
        number = isinstance(value, int)
        if parameter.is_constexpr or value is None or (number and value == 1 and not parameter.do_not_specialize):
            constants[path] = value
            return "constexpr"
        if not parameter.do_not_specialize and (not number or value % 16 == 0):
            divisible[path] = [["tt.divisibility", 16]]
        return "i32" if number else POINTERS[value.dtype]

    for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        signature[parameter.name] = kind(value, (i,), parameter)
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, divisible)


def build(call: Any, capability: int) -> Any:
    """Compile one recorded launch."""
    return triton.compile(source_of(call), target=GPUTarget("cuda", capability, 32), options=call[2])


def lower(call: Any, capability: int) -> tuple[Any, Callable[[], int]]:
    """Take one recorded launch through the compiler up to where its code is that of a GPU.

    Returns that module, and what finds how many bytes of shared memory it takes: by the next passes, after which come
    all those for LLVM, which are a third of the work and have no say in it.
    """
    source, target = source_of(call), GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    options = backend.parse_options({**call[2], **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *generators, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    for name in ("ttir", "ttgir"):
        # Gluon is written for a GPU in the first place.
        if name in stages:
            module = stages[name](module, {"target": target, **vars(options)})

    def allocate() -> int:
        manager = ir.pass_manager(context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        ptx = get_ptx_version_from_options(options, capability)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx)
        manager.run(module, "allocate")
        return int(module.get_int_attr("ttg.shared"))

    return module, allocate


def check(calls: list[Any], capability: int) -> list[Any]:
    compiled = [build(call, capability) for call in calls]
    for call, built in zip(calls, compiled, strict=True):
        assert built.metadata.shared <= SHARED[capability], call[0].__name__
        assert "cubin" in built.asm
    return compiled


def fit(calls: list[Any], capability: int) -> list[str]:
    """Assert that launches fit into shared memory; return their code before that is allocated."""
    codes = []
    for call in calls:
        module, allocate = lower(call, capability)
        codes.append(str(module))
        assert 0 <= allocate() <= SHARED[capability], call[0].__name__
    return codes


def loads_in_loops(code: str) -> int:
    """How many loads the compiler left where they are used, instead of copying ahead."""
    inside, found = 0, 0
    for line in code.splitlines():
        inside += ("scf.for" in line) - ("scf.yield" in line)
        found += bool(inside) and "tt.load" in line
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "D", "M", "config"), ROWS)
def test_compiles(monkeypatch, dtype, D, M, config):
    """For the architecture that the rows were chosen on."""
    calls = launches(monkeypatch, dtype, D, M, config, gated=False)
    assert len(calls) == (4 if isinstance(config, SplitWalk) else 2)
    if (dtype, D, M, config) in (row.values for row in largest(ROWS)):
        codes = [built.asm["ttgir"] for built in check(calls, 90)]
    else:
        codes = fit(calls, 90)
    if isinstance(config, ChunkedWalk) and config.prefetch and dtype != torch.float16:
        walks = [code for call, code in zip(calls, codes, strict=True) if "walk" in call[0].__name__]
        assert [loads_in_loops(code) for code in walks] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "D", "M", "config"), GROUPED + largest(ONE))
def test_fits_in_groups_and_for_one_token(monkeypatch, dtype, D, M, config):
    calls, split = launches(monkeypatch, dtype, D, M, config, gated=False), isinstance(config, SplitWalk)
    assert len(calls) == (8 + split if grouped(config) else 2 + 2 * split)
    fit(calls, 90)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "D", "M"), [(torch.bfloat16, 32, 32), (torch.float32, 64, 64)])
def test_loads_that_walks_wait_for_are_seen(monkeypatch, dtype, D, M):
    """Without `prefetch`, which is there so that they wait for none, as `test_compiles` has it."""
    calls = launches(monkeypatch, dtype, D, M, replace(TABLE[dtype][D, M], prefetch=False), gated=False)
    walks = [call for call in calls if "walk" in call[0].__name__]
    assert len(walks) == 2 and any(loads_in_loops(str(lower(call, 90)[0])) for call in walks)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "D", "capability"), [(torch.bfloat16, 128, 90), (torch.float32, 64, 80)])
def test_compiles_with_decays_per_key(monkeypatch, dtype, D, capability):
    (config,) = per_key_candidates(D, D, dtype, 4096)
    calls = launches(monkeypatch, dtype, D, D, config, gated=True, per_key=True)
    assert len(calls) == 9
    (check if capability == 90 else fit)(calls, capability)


@pytest.mark.every_variant
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("D", "M"), [(16, 16), (64, 64), (128, 128), (128, 256), (512, 256)])
def test_compiles_with_decays_per_key_for_every_architecture(monkeypatch, D, M, dtype, capability):
    (config,) = per_key_candidates(D, M, dtype, 4096)
    check(launches(monkeypatch, dtype, D, M, config, gated=True, tied=False, per_key=True), capability)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "D", "M", "config"), DEMANDING)
def test_compiles_with_all_options(monkeypatch, dtype, D, M, config):
    """For the architecture with less memory. In float32 attention is normalised, too, as all dtypes then are."""
    fit(launches(monkeypatch, dtype, D, M, config, gated=True, tied=dtype != torch.float32), 80)


@pytest.mark.every_variant
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("gated", [False, True], ids=["delta", "gated-packed"])
@pytest.mark.parametrize(("dtype", "D", "M", "config"), ROWS + GROUPED + ONE)
def test_compiles_for_every_architecture(monkeypatch, dtype, D, M, config, gated, capability):
    check(launches(monkeypatch, dtype, D, M, config, gated), capability)


@pytest.mark.every_variant
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("dtype", "D", "M", "config"), [row for row in ROWS if row.values[0] == torch.float32])
def test_compiles_gated_and_normalised(monkeypatch, dtype, D, M, config, capability):
    check(launches(monkeypatch, dtype, D, M, config, gated=True, tied=False), capability)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "phi", "nu", "M"), [(32, "dpfp", 4, 32), (64, "dpfp", 1, 128), (128, "elu", 0, 128)])
def test_the_most_features_fit_beside_the_most_values(monkeypatch, d, phi, nu, M):
    """In the dtype that asks for the most memory, on the architecture that has the least."""
    features = Features.named(phi, nu, True, True)
    D = features.size(d)
    assert holds_features(d, D, M) and not holds_features(d, D + 1, M) and not holds_features(d, D, M + 1)
    config = configuration(D, M, torch.float16, 999, 256, features)
    fit(launches(monkeypatch, torch.float16, d, M, config, gated=False, features=features)[-1:], 80)


def with_map(monkeypatch: Any, dtype: torch.dtype, T: int, d: int, features: Features) -> list[Any]:
    config = configuration(features.size(d), d, dtype, 999, T, features)
    return launches(monkeypatch, dtype, d, d, config, gated=False, features=features)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "T", "d", "features"), [row for row in MAPPED if row.id in ONCE_MAPPED])
def test_compiles_with_feature_maps(monkeypatch, dtype, T, d, features):
    fit(with_map(monkeypatch, dtype, T, d, features), 80)


@pytest.mark.every_variant
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("dtype", "T", "d", "features"), MAPPED)
def test_compiles_with_every_feature_map(monkeypatch, dtype, T, d, features, capability):
    check(with_map(monkeypatch, dtype, T, d, features), capability)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "D", "M"), [(torch.bfloat16, 32, 32), (torch.float16, 512, 256)])
def test_one_token_compiles(monkeypatch, dtype, D, M):
    calls: list[Any] = []
    monkeypatch.setattr(launcher, "_planned", {})
    monkeypatch.setattr(step, "take_step", Recorder(step.take_step, calls))
    q, v = (torch.empty(2, 1, 8, n, dtype=dtype, device="meta") for n in (D, M))
    gate = torch.empty(2, 1, 8, device="meta")
    gates = (gate, gate, None)
    step.step_plan(q, q, v, gates, True, True, Features(logits=1))(q, q, v, gates, None, None, False)
    check(calls, 90)
    assert len(calls) == 1
