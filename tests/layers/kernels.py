"""What the tests of the layers' kernels share: what is launched for the largest shapes, and what a GPU makes of it."""


class _Recorder:
    """Stands where a kernel stands and notes what it is called with."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append((self.kernel, arguments, options))


def record(monkeypatch, module, *names):
    """Return a list to which every launch of these kernels is added, instead of running."""
    calls = []
    for name in names:
        monkeypatch.setattr(module, name, _Recorder(getattr(module, name), calls))
    return calls


def fits(calls, count, capability=90):
    """Assert that the recorded launches, `count` of them, compile for a GPU and fit into its shared memory."""
    from tests.ops.test_triton_aot import SHARED, build

    assert len(calls) == count
    for kernel, arguments, options in calls:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        positional = [named.pop(name) for name in kernel.arg_names]
        built = build((kernel, positional, {"num_warps": 4, "num_stages": 3, **named}), capability)
        assert built.metadata.shared <= SHARED[capability], kernel.__name__
        assert "cubin" in built.asm
