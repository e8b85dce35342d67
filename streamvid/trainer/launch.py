"""What accelerate and DeepSpeed are told of a run: the config's word counts, and what they would ignore is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, ProfileKwargs

from streamvid.errors import ConfigError
from streamvid.modules.recompute_deepspeed import deepspeed_checkpoint
from streamvid.trainer.config import TrainConfig

_AUTO = {"enabled": "auto", "dtype": "auto"}


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The Accelerator of this process. ConfigError where the launcher and the config do not go together."""
    asked = next((name for name in ("DEEPSPEED", "FSDP") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"), None)
    # Without an accelerator, accelerate takes ranks for strangers unless it is told `cpu`; or, for DeepSpeed, which it
    # forgets with `cpu`, a backend.
    is_bare = not torch.accelerator.is_available()
    needs_backend = is_bare and asked == "DEEPSPEED"
    kwargs: list[Any] = [DistributedDataParallelKwargs(
        find_unused_parameters=config.find_unused_parameters, broadcast_buffers=False
    )]  # fmt: skip
    kwargs += [InitProcessGroupKwargs(backend="gloo")] if needs_backend else []
    if config.profile_steps:
        schedule = {"wait": 1, "warmup": 1, "active": config.profile_steps, "repeat": 1}
        kwargs.append(ProfileKwargs(schedule_option=schedule, output_trace_dir=str(config.output / "profile")))
    if missing := set(config.trackers) - set(map(str, get_available_trackers())):
        raise ConfigError(f"trackers has {min(missing)}, whose package is not installed; install it, or leave it out")
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        cpu=(config.cpu or is_bare) and not needs_backend,
        # A plugin, because a number gives way to the launcher's.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.accumulate),
        log_with=list(config.trackers) or None,
        project_dir=str(config.output),
        kwargs_handlers=kwargs,
    )
    used = accelerator.distributed_type.value
    if asked not in (None, used):
        raise ConfigError(f"{asked} is asked for without accelerators (cpu={config.cpu}); allowed: cpu_2ranks.yaml")
    sharded = used == "FSDP" or (used == "DEEPSPEED" and _tell_deepspeed(accelerator, config) == 3)
    if sharded and config.optimizer.ema_decay is not None:
        decay = config.optimizer.ema_decay
        raise ConfigError(f"ema_decay is {decay} and no rank has whole weights; allowed: DDP or ZeRO-2, or null")
    return accelerator


def _tell_deepspeed(accelerator: Accelerator, config: TrainConfig) -> int:
    """Fill what its JSON leaves to us; the stage of ZeRO."""
    told: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
    for key, name, value in (
        ("gradient_accumulation_steps", "accumulate", config.accumulate),
        ("gradient_clipping", "optimizer.grad_clip", config.optimizer.grad_clip or 0.0),
    ):
        if told.get(key, "auto") not in ("auto", value):
            raise ConfigError(f"{key} of DeepSpeed's JSON is {told[key]}, and {name} {value}; allowed there: 'auto'")
        told[key] = value
    # Only its own figures need this one: batches come in several sizes.
    told["train_micro_batch_size_per_gpu"] = config.batch_size if isinstance(config.batch_size, int) else 1
    # As everywhere here: float32 weights and autocast. DeepSpeed's own bf16 casts weights, and not what comes to them.
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    dtype = "bfloat16" if told["bf16"]["enabled"] else {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    if told.get("torch_autocast", _AUTO) == _AUTO:
        told["torch_autocast"] = {"enabled": dtype is not None} | ({} if dtype is None else {"dtype": dtype})
    # To an optimizer that is offloaded, accelerate would make Adam of any other.
    is_adam = config.optimizer.factory in ("torch.optim:AdamW", "torch.optim:Adam")
    told.setdefault("zero_force_ds_cpu_optimizer", is_adam)
    return int(told["zero_optimization"]["stage"])


def recompute_function(accelerator: Accelerator) -> Callable[..., Any] | None:
    """What recomputes blocks in place of torch: DeepSpeed, where its JSON has `activation_checkpointing`."""
    plugin = accelerator.state.deepspeed_plugin
    options = None if plugin is None else plugin.deepspeed_config.get("activation_checkpointing")
    return None if options is None else deepspeed_checkpoint(options, accelerator.device.type)
