"""The C++ backend in another process, which a sanitizer watches or another processor runs; see cpu_driver.cpp."""

import ctypes
import struct
import subprocess
from functools import partial
from pathlib import Path

import torch

from fastweights.ops.cpu import backend, short_convolution
from fastweights.ops.cpu.compiler import FLAGS, SOURCES, run_compiler
from fastweights.ops.cpu.views import View


def build_driver(compiler, options, folder):
    """Compile the backend and the driver into one program, and return its path."""
    program = folder / "driver"
    driver = Path(__file__).with_suffix(".cpp")
    run_compiler(compiler, [*FLAGS, *options, "-pthread", f"-I{SOURCES}", str(driver)], program)
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
        for module in (backend, short_convolution):
            monkeypatch.setattr(module, "library", lambda: self)

    def __getitem__(self, name):
        return partial(self.run, name)

    __getattr__ = __getitem__

    def run(self, name, reference, wide=0):
        call = reference._obj
        pieces = [(offset, data, size) for offset, data, size in self.pieces(call) if data]
        header = struct.pack("64s4q", name.encode(), wide, torch.get_num_threads(), ctypes.sizeof(call), len(pieces))
        table = b"".join(struct.pack("2q", offset, size) for offset, _, size in pieces)
        contents = b"".join(ctypes.string_at(data, size) for _, data, size in pieces)
        self.sizes.clear()
        try:
            self.process.stdin.write(header + bytes(call) + table + contents)
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail()
        (outcome,) = struct.unpack("q", self.read(8))
        for _, data, size in pieces:
            ctypes.memmove(data, self.read(size), size)
        return outcome

    def pieces(self, call):
        """Offset in the call, address and size in bytes of everything that it points at."""
        for name, kind in call._fields_:
            offset, field = getattr(type(call), name).offset, getattr(call, name)
            if kind is View or kind is ctypes.c_void_p:
                data = field.data if kind is View else field
                yield offset, data, self.sizes[data] if data else 0
            elif field and kind is not ctypes.c_int64:  # the bounds of sequences
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
