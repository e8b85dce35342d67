"""What of a module training changes, and tensors that ranks hold parts of (FSDP, DeepSpeed), made whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from streamvid.errors import StreamvidError


def changing(module: nn.Module) -> dict[str, Tensor]:
    """By name: parameters that train, and buffers of parts in train mode, as those of batch normalisation."""
    found: dict[str, Tensor] = {name: one for name, one in module.named_parameters() if one.requires_grad}
    for path, part in module.named_modules():
        if part.training:
            found |= {f"{path}.{name}".lstrip("."): one for name, one in part.named_buffers(recurse=False)}
    return found


def require_numbers(module: nn.Module, tensors: Mapping[str, Tensor], step: int) -> None:
    """StreamvidError where one of `tensors` that trains has an infinity or NaN: saved, it would be gone on from."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not tensors[name].isfinite().all():
            raise StreamvidError(
                f"{name} has values that are no numbers after step {step}, which is not saved; what was saved before "
                "stays: lower optimizer.lr or optimizer.grad_clip"
            )


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor whole, on the CPU; every rank calls it, with the same names in the same order."""
    whole = {}
    for name, tensor in tensors.items():
        part: Any = tensor.detach()
        if hasattr(tensor, "ds_id"):
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([tensor]):
                whole[name] = tensor.detach().to("cpu", copy=True)
        else:
            # A copy on CPUs too: FSDP frees what it made whole for a forward at the next save of a state.
            whole[name] = (part.full_tensor() if hasattr(part, "full_tensor") else part).to("cpu", copy=True)
    return whole
