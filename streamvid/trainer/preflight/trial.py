"""Training steps outside of a run: real module, optimizer and batches, but nothing is saved."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator

from streamvid.loader.loader import VideoLoader
from streamvid.modules.build import build_module
from streamvid.modules.config import ActivationCheckpointingConfig
from streamvid.modules.optimizer import build_optimizer
from streamvid.trainer.checkpoint import require_output
from streamvid.trainer.config import EvalConfig, TrainConfig
from streamvid.trainer.data import check_features, open_loaders, schedule_of
from streamvid.trainer.launch import accelerating
from streamvid.trainer.tasks import TaskModule, find_task

if TYPE_CHECKING:
    from streamvid.buckets.bucket import Bucket
    from streamvid.loader.batch.batch import Batch


@dataclass(frozen=True)
class TrialRun:
    """Parts of a run in one process.

    loader: loader of the run. The epoch begins with one step of each bucket, the costliest bucket first.
    module: task module on the accelerator's device.
    """

    config: TrainConfig
    accelerator: Accelerator
    loader: VideoLoader
    module: TaskModule
    optimizer: torch.optim.Optimizer

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Buckets with at least one step, the costliest bucket first."""
        return [batch.bucket for batch in self.batches()]

    def batches(self) -> list[Batch]:
        """Return one batch in host memory for each bucket with at least one step."""
        steps = {row.bucket_id: row.num_steps for row in self.loader.plan_report()}
        self.loader.set_epoch(0)
        return [batch.clone() for batch in itertools.islice(self.loader, sum(count > 0 for count in steps.values()))]

    def step(self, batch: Batch) -> None:
        """Take one optimizer step on a batch, as in training."""
        self.module.train()
        moved = batch.to(self.accelerator.device)
        with self.accelerator.autocast():
            loss = self.module(moved)["loss"].float().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, batch: Batch) -> float:
        """Return the duration of one step on a batch, including the work that it queues on the device."""
        self._wait()
        start = time.perf_counter()
        self.step(batch)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def open_trial(config: TrainConfig, checkpoints_activations: bool | None = None) -> Iterator[TrialRun]:
    """Open the parts of a run in this process.

    checkpoints_activations: False to keep all activations; None uses the run's configuration.
    Raises the same errors as a run.
    """
    model = config.model
    if checkpoints_activations is False:
        model = replace(model, activation_checkpointing=ActivationCheckpointingConfig())
    schedule = replace(schedule_of(config), order="largest-first")
    loader: dict[str, Any] = {
        **config.data.loader,
        "schedule": replace(schedule, order="largest-first"),
        "sync": "bucket",
    }
    data = replace(config.data, loader=loader)
    config = replace(config, data=data, model=model, eval=EvalConfig(steps=None, num_batches=0))
    require_output(config.output)
    with ExitStack() as stack:
        accelerator = stack.enter_context(accelerating(config))
        opened, _ = stack.enter_context(open_loaders(config))
        module = build_module(config.model, task=config.task, seed=config.seed)
        check_features(config, module)
        moved = TaskModule(module, find_task(config.task)).to(accelerator.device)
        yield TrialRun(config, accelerator, cast(VideoLoader, opened), moved, build_optimizer(config.optimizer, module))
