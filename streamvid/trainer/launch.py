"""The process of a run: its Accelerator, DeepSpeed settings, and signals that ask it to stop."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, ProfileKwargs

from streamvid.errors import ConfigError
from streamvid.modules.activation_checkpointing import deepspeed_checkpoint
from streamvid.trainer.config import TrainConfig

_AUTO = {"enabled": "auto", "dtype": "auto"}
_GLOO_SECONDS = 0.5


@dataclass
class StopRequest:
    """First signal that asked this process to stop, if any.

    has_progress: False if there is nothing to save yet, so that Ctrl-C takes effect immediately.
    """

    signal_number: int | None = None
    has_progress: bool = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGINT, SIGTERM and SIGUSR1, so that a run can save before it stops.

    A second Ctrl-C interrupts the process as usual.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (request.signal_number == signal.SIGINT or not request.has_progress):
            raise KeyboardInterrupt
        request.signal_number = request.signal_number or number

    # In Python, only the main thread can handle signals; in other threads the caller decides when to stop.
    is_main = threading.current_thread() is threading.main_thread()
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if is_main else ()
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def accelerating(config: TrainConfig) -> Iterator[Accelerator]:
    """Create an Accelerator for this process. On exit, reset accelerate's settings, so that later runs can change them.

    If the caller has already created an Accelerator, the settings are not reset. A process group that a launcher set up
    is not closed.
    Raises ConfigError if the settings of the launcher and of `config` disagree.
    """
    is_callers = is_initialized()
    try:
        yield _make_accelerator(config)
    finally:
        if not is_callers:
            AcceleratorState._reset_state(reset_partial_state="RANK" not in os.environ)


def _make_accelerator(config: TrainConfig) -> Accelerator:
    backend = next((name for name in ("DEEPSPEED", "FSDP") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"), None)
    # Without an accelerator, accelerate connects the ranks only if `cpu` is set. It ignores DeepSpeed if `cpu` is set,
    # so DeepSpeed needs an explicit communication backend instead.
    has_none = not torch.accelerator.is_available()
    needs_gloo = has_none and backend == "DEEPSPEED"
    if missing := set(config.logging.trackers) - set(map(str, get_available_trackers())):
        raise ConfigError(
            f"logging.trackers contains {min(missing)!r}, which is unknown or not installed; install its package, or "
            "omit it"
        )
    accelerator = Accelerator(
        mixed_precision=config.accelerate.mixed_precision,
        cpu=(config.accelerate.cpu or has_none) and not needs_gloo,
        # A plugin, because the launcher's number would override a plain number.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.data.accumulate),
        log_with=list(config.logging.trackers) or None,
        project_dir=str(config.output),
        kwargs_handlers=_handlers(config, needs_gloo),
    )
    if accelerator.num_processes > 1:
        # After the last collective, Gloo's threads still release its tensors, for which they need the GIL. If they ask
        # for it while Python 3.11 to 3.13 finalizes, the process aborts (pytorch#190489). Destroying the group does not
        # end these threads: DistributedDataParallel keeps references to it. A sleep leaves the GIL to them.
        atexit.register(time.sleep, _GLOO_SECONDS)
    used = accelerator.distributed_type.value
    if backend not in (None, used):
        raise ConfigError(
            f"the launcher requests {backend}, but accelerate selected {used} (accelerate.cpu={config.accelerate.cpu}, "
            f"processes: {accelerator.num_processes}); on GPUs, set accelerate.cpu to false and start several "
            "processes; on CPUs, launch with configs/accelerate/cpu_2ranks.yaml"
        )
    if used == "DEEPSPEED":
        _configure_deepspeed(accelerator, config)
    if has_sharded_weights(accelerator) and config.optimizer.ema_decay is not None:
        raise ConfigError(
            f"optimizer.ema_decay={config.optimizer.ema_decay} cannot be combined with sharded weights; "
            "use DDP or ZeRO-2, or set optimizer.ema_decay to null"
        )
    return accelerator


def has_sharded_weights(accelerator: Accelerator) -> bool:
    """Return True if each forward pass gathers weights from other ranks (FSDP, ZeRO-3)."""
    used = accelerator.distributed_type.value
    return used == "FSDP" or (used == "DEEPSPEED" and _zero_stage(accelerator) == 3)


def end_processes() -> None:
    """Leave the process group that a launcher set up."""
    PartialState().destroy_process_group()


def is_launched_alone(environ: Mapping[str, str]) -> bool:
    """Return True if accelerate's CPU launcher set up a process group but expects mpirun to start its processes."""
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    is_cpu_launch = environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_PORT" in environ
    return is_cpu_launch and not any(name in environ for name in ranks)


def checkpoint_function(accelerator: Accelerator) -> Callable[..., Any] | None:
    """Return DeepSpeed's checkpoint function if DeepSpeed's JSON sets `activation_checkpointing`.

    Otherwise, return None, so that torch's function is used.
    """
    plugin = accelerator.state.deepspeed_plugin
    options = None if plugin is None else plugin.deepspeed_config.get("activation_checkpointing")
    return None if options is None else deepspeed_checkpoint(options, accelerator.device.type)


def _handlers(config: TrainConfig, needs_gloo: bool) -> list[Any]:
    found: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    if needs_gloo:
        found.append(InitProcessGroupKwargs(backend="gloo"))
    if config.logging.profile_steps:
        schedule = {"wait": 1, "warmup": 1, "active": config.logging.profile_steps, "repeat": 1}
        found.append(ProfileKwargs(schedule_option=schedule, output_trace_dir=str(config.output / "profile")))
    return found


def _configure_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Fill in the "auto" values in DeepSpeed's JSON."""
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    for key, name, value in (
        ("gradient_accumulation_steps", "data.accumulate", config.data.accumulate),
        ("gradient_clipping", "optimizer.grad_clip", config.optimizer.grad_clip or 0.0),
    ):
        if settings.get(key, "auto") not in ("auto", value):
            raise ConfigError(
                f"{key} in DeepSpeed's JSON is {settings[key]}, but {name} is {value}; set {key} to 'auto'"
            )
        settings[key] = value
    # Used only for DeepSpeed's own throughput figures, because batch sizes vary.
    batch_size = config.data.batch_size
    settings["train_micro_batch_size_per_gpu"] = batch_size if isinstance(batch_size, int) else 1
    # Float32 weights and autocast, as without DeepSpeed. Its own bf16 mode casts weights but not their inputs.
    precision = config.accelerate.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    dtype = "bfloat16" if settings["bf16"]["enabled"] else {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    if settings.get("torch_autocast", _AUTO) == _AUTO:
        settings["torch_autocast"] = {"enabled": dtype is not None} | ({} if dtype is None else {"dtype": dtype})
    # accelerate would replace any other offloaded optimizer with DeepSpeed's Adam.
    is_adam = config.optimizer.factory in ("torch.optim:AdamW", "torch.optim:Adam")
    settings.setdefault("zero_force_ds_cpu_optimizer", is_adam)


def _zero_stage(accelerator: Accelerator) -> int:
    return int(accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"])
