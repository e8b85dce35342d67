"""What accelerate is told of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProfileKwargs

from streamvid.trainer.config import TrainConfig


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The Accelerator of this process, as the launcher's environment and the config say."""
    # Without `cpu`, accelerate takes the ranks of a machine without accelerator for strangers to each other.
    cpu = config.cpu or not torch.accelerator.is_available()
    handlers: list[Any] = [
        DistributedDataParallelKwargs(find_unused_parameters=config.find_unused_parameters, broadcast_buffers=False)
    ]
    if config.profile_steps:
        schedule = {"wait": 1, "warmup": 1, "active": config.profile_steps, "repeat": 1}
        handlers.append(ProfileKwargs(schedule_option=schedule, output_trace_dir=str(config.output / "profile")))
    return Accelerator(
        mixed_precision=config.mixed_precision,
        cpu=cpu,
        gradient_accumulation_steps=config.accumulate,
        log_with=list(config.trackers) or None,
        project_dir=str(config.output),
        kwargs_handlers=handlers,
    )


def recompute_function(accelerator: Accelerator) -> Callable[..., Any] | None:
    """What recomputes in place of torch's own."""
    return None
