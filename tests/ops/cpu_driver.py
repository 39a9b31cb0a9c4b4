"""The C++ backend in another process, which a sanitizer watches or another processor runs; see cpu_driver.cpp."""

import ctypes
import struct
import subprocess
from functools import partial
from pathlib import Path

import torch

from fastweights.ops import backends
from fastweights.ops.cpu import backend, features, gated_norm, linear_attention, short_convolution, softmax, step
from fastweights.ops.cpu.compiler import FLAGS, run_compiler
from fastweights.ops.cpu.views import View


def build_driver(compiler, options, folder, linking=()):
    """Compile the backend and the driver into one program, and return its path."""
    program = folder / "driver"
    driver = Path(__file__).with_suffix(".cpp")
    run_compiler(compiler, [*FLAGS, *options], ["-pthread", *linking], program, [driver])
    return program


class Driver:
    """Takes the place of the library: a function, called as ctypes does, sends what it was given to the program.

    How much memory is behind an address is known from the tensors that were asked for theirs since the last call.
    """

    def __init__(self, monkeypatch, *command, short_by=0):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.sizes = {}

        def data_ptr(x):
            address = torch._C.TensorBase.data_ptr(x)
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            self.sizes[address] = (last + 1) * x.element_size() - short_by if x.numel() else 0
            return address

        monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
        for module in (backend, features, gated_norm, linear_attention, short_convolution, softmax, step):
            monkeypatch.setattr(module, "library", lambda: self)
        # The step of a call that was prepared before would run where it was prepared.
        monkeypatch.setattr(backends, "EXECUTABLES", {})

    def __getitem__(self, name):
        return partial(self.run, name)

    __getattr__ = __getitem__

    def run(self, name, *arguments):
        plan, call, wide = b"", b"", 0
        if name == "fastweights_step":
            plan, call = arguments
        elif arguments:
            call, wide = arguments[0]._obj, sum(arguments[1:])
        # Several pointers may be to the same memory, as those of a state that is overwritten.
        pieces = [(offset, data, size) for offset, data, size in self.pieces(call) if data]
        places = [data for _, data, _ in pieces]
        firsts = [places.index(data) for data in places]
        contents = [(data, size) for i, (_, data, size) in enumerate(pieces) if firsts[i] == i]
        sizes = wide, torch.get_num_threads(), len(plan), len(bytes(call)), len(pieces)
        table = b"".join(
            struct.pack("3q", offset, size, first) for (offset, _, size), first in zip(pieces, firsts, strict=True)
        )
        message = [struct.pack("64s5q", name.encode(), *sizes), plan, bytes(call), table]
        if call:
            self.sizes.clear()
        try:
            self.process.stdin.write(b"".join([*message, *(ctypes.string_at(*content) for content in contents)]))
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail()
        (outcome,) = struct.unpack("q", self.read(8))
        for data, size in contents:
            ctypes.memmove(data, self.read(size), size)
        return outcome

    def pieces(self, call, start=0):
        """Offset in the call, address and size in bytes of everything that it points at."""
        if isinstance(call, bytes):
            for i, (data,) in enumerate(struct.iter_unpack("q", call)):
                yield 8 * i, data, self.sizes[data] if data else 0
            return
        for name, kind in call._fields_:
            offset, field = start + getattr(type(call), name).offset, getattr(call, name)
            if kind is View or kind is ctypes.c_void_p:
                data = field.data if kind is View else field
                yield offset, data, self.sizes[data] if data else 0
            elif isinstance(field, ctypes.Structure):
                yield from self.pieces(field, offset)
            elif isinstance(field, ctypes._Pointer) and field:  # the bounds of sequences
                yield offset, ctypes.addressof(field.contents), 8 * (call.N + 1)

    def read(self, size):
        content = self.process.stdout.read(size)
        return content if len(content) == size else self.fail()

    def fail(self):
        raise AssertionError(self.process.communicate()[1].decode(errors="replace"))

    def close(self):
        """End the program, which tells of memory that it did not free."""
        _, said = self.process.communicate()
        assert self.process.returncode == 0 and not said, said.decode(errors="replace")
