"""Tensors that ranks hold parts of, as FSDP and DeepSpeed leave them, made whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor whole, on the CPU; every rank calls it, with the same names in the same order."""
    whole = {}
    for name, tensor in tensors.items():
        part: Any = tensor.detach()
        if hasattr(tensor, "ds_id"):
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([tensor]):
                whole[name] = tensor.detach().cpu().clone()
        else:
            whole[name] = (part.full_tensor() if hasattr(part, "full_tensor") else part).cpu()
    return whole
