"""Gradient checkpointing by DeepSpeed, which goes with ZeRO-3 and can keep less of a block's inputs than torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_FIELDS = (
    "partition_activations", "contiguous_memory_optimization", "number_checkpoints",
    "cpu_checkpointing", "synchronize_checkpoint_boundary", "profile",
)  # fmt: skip


def deepspeed_checkpoint(options: Mapping[str, Any], device: str) -> Callable[..., Any]:
    """checkpoint(function, *args) for `recompute.wrap`; options: `activation_checkpointing` of DeepSpeed's JSON."""
    from deepspeed import checkpointing

    checkpointing.configure(None, None, *(options.get(name) for name in _FIELDS))

    def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
        # On the way back autocast is off, and DeepSpeed, unlike torch, does not switch it on again.
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def again(*args: Any) -> Any:
            with torch.autocast(device, dtype, enabled=enabled):
                return function(*args)

        return checkpointing.checkpoint(again, *args)

    return checkpoint
