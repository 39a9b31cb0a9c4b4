"""The C++ backend in another process, which a sanitizer watches or another processor runs; see cpu_driver.cpp."""

import ctypes
import struct
import subprocess
from pathlib import Path

import torch

from fastweights.ops.cpu import backend as cpu
from fastweights.ops.cpu.compiler import FLAGS, SOURCES, run_compiler


def build_driver(compiler, options, folder):
    """Compile the backend and the driver into one program, and return its path."""
    program = folder / "driver"
    driver = Path(__file__).with_suffix(".cpp")
    run_compiler(compiler, [*FLAGS, *options, "-pthread", f"-I{SOURCES}", str(driver)], program)
    return program


class Driver:
    """Takes the place of the library: a function, called as ctypes does, sends what it was given to the program."""

    def __init__(self, *command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __getitem__(self, name):
        backward = {"fastweights_forward": 0, "fastweights_backward": 1}[name]

        def run(reference, wide):
            call = reference._obj
            pieces = [(offset, data, size) for offset, data, size in _pieces(call, wide) if data]
            header = struct.pack("5q", backward, wide, torch.get_num_threads(), ctypes.sizeof(call), len(pieces))
            table = b"".join(struct.pack("2q", offset, size) for offset, _, size in pieces)
            contents = b"".join(ctypes.string_at(data, size) for _, data, size in pieces)
            try:
                self.process.stdin.write(header + bytes(call) + table + contents)
                self.process.stdin.flush()
            except BrokenPipeError:
                self.fail()
            (outcome,) = struct.unpack("q", self.read(8))
            for _, data, size in pieces:
                ctypes.memmove(data, self.read(size), size)
            return outcome

        return run

    def read(self, size):
        content = self.process.stdout.read(size)
        return content if len(content) == size else self.fail()

    def fail(self):
        raise AssertionError(self.process.communicate()[1].decode(errors="replace"))

    def close(self):
        """End the program, which tells of memory that it did not free."""
        _, said = self.process.communicate()
        assert self.process.returncode == 0 and not said, said.decode(errors="replace")


def _pieces(call, wide):
    """Offset in the call, address and size in bytes of everything that it points at."""
    rows = 1 if call.packed else call.N
    steps = call.bounds[call.N] // rows
    state = call.H * call.D * call.M * (8 if wide else 4)
    chunks = sum(-(-(call.bounds[i + 1] - call.bounds[i]) // call.C) for i in range(call.N))
    for name, kind in call._fields_:
        offset, field = getattr(type(call), name).offset, getattr(call, name)
        if kind is cpu.View:
            heads = call.H // call.group if name[-1] in "qk" else call.H
            width = {"q": call.D, "k": call.D, "v": call.M, "y": call.M, "a": call.D if call.per_key else 1}
            last = (rows - 1) * field.batch + (steps - 1) * field.time + (heads - 1) * field.head
            yield offset, field.data, (last + width.get(name[-1], 1)) * field.bytes if rows * steps else 0
        elif name == "bounds":
            yield offset, ctypes.addressof(field.contents), 8 * (call.N + 1)
        elif kind is ctypes.c_void_p:
            yield offset, field, state * (chunks if name in ("before", "after") else call.N)
