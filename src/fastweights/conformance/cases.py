"""The cases: one row each. To add one, add a row."""

from dataclasses import dataclass, field
from functools import partial

import torch

from fastweights.conformance.problem import Recurrence, Setting
from fastweights.conformance.ways import Way, as_first_and_last_of, beside_nan, in_parts, plainly, poisoned, row_by_row

GATES = ("q", "k", "v", "g", "beta")
PACKED = (0, 5, 64, 0, 0, 1, 63, 70, 0)


@dataclass(frozen=True)
class Case:
    """One thing that a function has to get right.

    Attributes:
        name: for the table and `--case`.
        setting: the tensors that are drawn.
        way: how the function is called.
        outputs: what is compared, of "o" and "state", the final one.
        gradients: of what, as far as it is there; () for none.
        through: the output that is differentiated.
        bytes_on_gpu: memory that it needs on a GPU, without which it is skipped; 0 for a case that runs anywhere.
    """

    name: str
    setting: Setting = field(default_factory=Setting)
    way: Way = plainly
    outputs: tuple[str, ...] = ("o",)
    gradients: tuple[str, ...] = GATES
    through: str = "o"
    bytes_on_gpu: int = 0

    @property
    def wants_state(self) -> bool:
        """Whether the final state is asked for."""
        return "state" in (*self.outputs, self.through)

    def not_applicable(self, recurrence: Recurrence) -> str | None:
        """Say why the case does not apply to a recurrence; None where it does."""
        if self.setting.log_decay is not None and recurrence.decays == "no":
            return "this recurrence has no decay"
        if self.setting.beta is not None and not recurrence.beta:
            return "this recurrence has no beta"
        return None

    def skipped(self, device: str) -> str | None:
        """Say why the case cannot be run on a device; None where it can."""
        if not self.bytes_on_gpu:
            return None
        needs = f"needs a GPU with {self.bytes_on_gpu / 2**30:.0f} GiB of free memory"
        if not device.startswith("cuda"):
            return needs
        free = torch.cuda.mem_get_info(torch.device(device))[0]
        return None if free >= self.bytes_on_gpu else f"{needs}; there are {free / 2**30:.0f} GiB"


BOTH = ("o", "state")
# 32 heads of 64 and 128 tokens: rows enough for 2^31 elements, and one more.
ROWS = 2**31 // (128 * 32 * 64) + 1

CASES = [
    Case("plain"),
    *(Case(f"T = {T}", Setting(T=T)) for T in (1, 63, 64, 65)),
    Case("T = 1000", Setting(B=1, T=1000, H=1)),
    *(Case(f"log decay {g:g}", Setting(log_decay=g)) for g in (0.0, -1e-7, -5.0, -100.0)),
    Case("log decays -0.001 and -100", Setting(log_decay="mixed")),
    *(Case(f"beta = {beta:g}", Setting(beta=beta)) for beta in (0.0, 1.0, 2.0)),
    Case("zero keys", Setting(keys="zero")),
    Case("equal keys", Setting(keys="equal")),
    Case("equal keys, beta = 2", Setting(keys="equal", beta=2.0)),
    Case("K = 24, V = 40", Setting(K=24, V=40)),
    Case("K = 40, V = 24", Setting(K=40, V=24)),
    *(Case(f"K = V = {D}", Setting(B=1, H=1, K=D)) for D in (60, 100, 256)),
    Case("2 value heads a key head", Setting(HV=4)),
    Case("not contiguous", Setting(strided=True, state=True), outputs=BOTH),
    Case("initial state", Setting(state=True)),
    Case("final state", Setting(state=True), outputs=BOTH),
    Case("gradient of the initial state", Setting(state=True), outputs=(), gradients=("state",)),
    Case(
        "gradient through the final state",
        Setting(state=True),
        outputs=(),
        gradients=("k", "v", "g", "beta", "state"),
        through="state",
    ),
    *(
        Case(f"in parts, cut at {', '.join(map(str, cuts))}", Setting(T=130), partial(in_parts, cuts=cuts), BOTH)
        for cuts in ((1,), (64,), (37, 101), (63, 64, 65, 129))
    ),
    Case("token by token", Setting(T=20), in_parts, BOTH),
    Case("batch of 5", Setting(B=5)),
    Case("each row of it alone", Setting(B=5), row_by_row),
    Case("beside a row of NaN", way=beside_nan),
    Case("new memory full of NaN", Setting(state=True), poisoned, BOTH),
    Case("packed, some sequences empty", Setting(lengths=PACKED)),
    Case("packed, with states", Setting(lengths=PACKED, state=True), outputs=BOTH, gradients=(*GATES, "state")),
    Case("packed behind a sequence of NaN", Setting(lengths=PACKED), beside_nan),
    Case("packed, new memory full of NaN", Setting(lengths=PACKED, state=True), poisoned, BOTH),
    Case("mask", Setting(masked=True), outputs=BOTH),
    Case(
        "more than 2^31 elements",
        Setting(T=128, H=32, K=64),
        partial(as_first_and_last_of, B=ROWS),
        gradients=(),
        bytes_on_gpu=64 * 2**30,
    ),
]
