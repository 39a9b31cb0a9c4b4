"""The build hook of the wheel: puts in the C++ backend, compiled for every level of processors.

Without a compiler, or on a platform without levels, the wheel has the sources only, which are built at first use.
"""

import importlib.util
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "fastweights/ops/cpu"


class CompiledBackend(BuildHookInterface):
    """Compiles into a temporary folder, so that the checkout stays as it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say in the wheel's tag for which platform; an editable install builds at first use."""
        if version == "editable":
            return
        # By its file: the package itself imports PyTorch, which a build should not need.
        spec = importlib.util.spec_from_file_location("compiler", Path(self.root, "src", PACKAGE, "compiler.py"))
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        levels, program = compiler.levels(), compiler.find_compiler()
        if not levels or program is None:
            missing = "C++ compiler" if levels else f"list of processors for {sysconfig.get_platform()}"
            self.app.display_warning(f"no {missing}: the C++ backend will be built at first use")
            return
        self.folder = tempfile.TemporaryDirectory()
        outputs = [Path(self.folder.name, f"{level.name}.so") for level in levels]
        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda level, output: compiler.compile_library(program, level, output), levels, outputs))
        except RuntimeError as error:
            self.app.display_warning(f"the C++ backend will be built at first use, because {error}")
            return
        build_data["force_include"] |= {str(path): f"{PACKAGE}/lib/{path.name}" for path in outputs}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder, whose files are in the wheel now."""
        if folder := vars(self).get("folder"):
            folder.cleanup()
