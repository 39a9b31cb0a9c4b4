"""Parameters of which each process has a part, as FSDP makes them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is spread over processes.

    None is where nobody has imported `torch.distributed.tensor`, which takes too long to do it here.
    """
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and isinstance(tensor, sharding.DTensor)
