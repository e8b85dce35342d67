"""train(): batches in, a flow model out. Processes, devices and precision are accelerate's business."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from streamvid.errors import StreamvidError
from streamvid.trainer.checkpoint import Progress, find_checkpoint, load_checkpoint, save_checkpoint
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import BatchClock, Batches, collect_fixed_batches, evaluate, open_loaders
from streamvid.trainer.flow import draw_noise_and_times, rectified_flow_loss, seeded_generator
from streamvid.trainer.metrics import append_metrics, drop_metrics_after
from streamvid.trainer.model import build_model
from streamvid.trainer.stop import StopRequest, stop_requests

if TYPE_CHECKING:
    from streamvid.loader.batch import Batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """Where a run ended. `stopped_by` is the signal that ended it early, its checkpoint saved; None: it is complete."""

    output: Path
    step: int
    num_steps: int
    num_samples: int
    loss: float | None
    eval_loss: float | None
    stopped_by: signal.Signals | None


def train(
    config: TrainConfig, loader: Batches | None = None, eval_loader: Iterable[Batch] | None = None
) -> TrainResult:
    """Train the small default model as `config` says, from its newest checkpoint where there is one.

    loader, eval_loader: batches to use in place of those of `config.dataset`; the caller closes them. A loader
    without an eval_loader trains without evaluation.
    Ctrl-C and SIGTERM end it after the current step, its checkpoint saved.
    Raises ConfigError, StateError, what the loader raises, and StreamvidError where the loss is no number any more.
    """
    # Without `cpu`, accelerate takes the ranks of a machine without accelerator for strangers to each other.
    cpu = config.cpu or not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=cpu)
    with ExitStack() as stack:
        if loader is None:
            loader, eval_loader = stack.enter_context(open_loaders(config))
        stop = stack.enter_context(stop_requests())
        return _loop(_Run(accelerator, config, loader, eval_loader), stop)


def _loop(run: _Run, stop: StopRequest) -> TrainResult:
    config, progress, saved = run.config, run.progress, run.progress
    if progress.step == 0:
        run.report(progress)
    clock = BatchClock(run.loader)
    bar = tqdm(total=run.num_steps, initial=progress.step, unit="step", disable=None if run.is_main else True)
    with bar:
        while progress.step < run.num_steps and not run.any_rank(stop.signal_number is not None):
            batch = clock.next_batch()
            loss = run.optimize(batch, progress.step + 1)
            progress = progress.after(len(batch.sample_keys) * run.accelerator.num_processes)
            is_last = progress.step == run.num_steps
            if is_last or run.is_due(progress.step, config.log_every_steps, config.eval.every_steps):
                run.report(progress, loss=loss, **clock.take_fields(), bucket=batch.bucket.id)
            if is_last or run.is_due(progress.step, config.save_every_steps):
                run.save(progress)
                saved = progress
            bar.update()
    if saved != progress:
        run.save(progress)
    stopped = progress.step < run.num_steps
    return TrainResult(
        output=config.output,
        step=progress.step,
        num_steps=run.num_steps,
        num_samples=progress.num_samples,
        loss=run.last.get("loss"),
        eval_loss=run.last.get("eval_loss"),
        # A rank that got no signal itself stops for one that did.
        stopped_by=signal.Signals(stop.signal_number or signal.SIGTERM) if stopped else None,
    )


class _Run:
    """What a run holds from its first step to its last, the same on every rank but for the batches."""

    def __init__(
        self, accelerator: Accelerator, config: TrainConfig, loader: Batches, eval_loader: Iterable[Batch] | None
    ) -> None:
        self.accelerator, self.config, self.loader = accelerator, config, loader
        self.is_main: bool = accelerator.is_main_process
        self.last: dict[str, Any] = {}
        folder = find_checkpoint(config)
        # No rank may write before every rank has looked.
        accelerator.wait_for_everyone()
        options = config.optimizer
        model = build_model(config.model, config.seed)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        num_batches = 0 if eval_loader is None else config.eval.num_batches
        self.fixed = collect_fixed_batches(eval_loader or (), num_batches, config.seed, accelerator.process_index)
        self.progress = Progress()
        if folder is not None:
            self.progress, loader_state = load_checkpoint(accelerator, config, folder)
            loader.load_state_dict(loader_state)
        if self.is_main:
            config.output.mkdir(parents=True, exist_ok=True)
            drop_metrics_after(config.output, self.progress.step if folder is not None else -1)
        self.num_steps = self._num_steps()

    def _num_steps(self) -> int:
        if self.config.num_steps is not None:
            return self.config.num_steps
        loader, epochs = self.loader, self.config.num_epochs or 1
        if loader.epoch >= epochs:
            return self.progress.step
        # From where the loader stands, because other ranks or batch sizes make other steps of what is left.
        later = loader.num_steps(epochs) - loader.num_steps(loader.epoch + 1)
        return self.progress.step + loader.num_steps_left + later

    def optimize(self, batch: Batch, step: int) -> Tensor:
        """One step of the optimizer; the loss of this rank's batch, still on its device."""
        device, options = self.accelerator.device, self.config.optimizer
        batch = batch.to(device)
        video = batch.normalized(torch.float32)
        generator = seeded_generator(device, self.config.seed, step, self.accelerator.process_index)
        noise, times = draw_noise_and_times(video, generator)
        losses = rectified_flow_loss(self.model, video, batch.text, noise, times)
        loss = losses.mean() * batch.loss_weight
        self.accelerator.backward(loss)
        if options.grad_clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), options.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr_at(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def report(self, progress: Progress, loss: Tensor | None = None, **fields: Any) -> None:
        """Add a line to metrics.jsonl, with the held-out loss where it is due; every rank calls it."""
        step = progress.step
        record: dict[str, Any] = {"step": step}
        if loss is not None:
            mean = float(self.accelerator.reduce(loss, reduction="mean"))
            if not math.isfinite(mean):
                raise StreamvidError(f"loss is {mean} at step {step}; lower optimizer.lr or optimizer.grad_clip")
            lr = self.config.optimizer.lr_at(step)
            record |= {"loss": mean, "lr": lr, "samples": progress.num_samples, **fields}
        if self.fixed and (step in (0, self.num_steps) or self.is_due(step, self.config.eval.every_steps)):
            record["eval_loss"] = evaluate(self.accelerator, self.model, self.fixed)
        self.last |= record
        if self.is_main and len(record) > 1:
            append_metrics(self.config.output, record)
            _log.info("%s", ", ".join(f"{name} {_brief(value)}" for name, value in record.items()))

    def save(self, progress: Progress) -> None:
        save_checkpoint(self.accelerator, self.model, self.config, progress, self.loader.state_dict())

    def any_rank(self, here: bool) -> bool:
        """Whether `here` holds on a rank, so that all act on a signal at the same step."""
        if self.accelerator.num_processes == 1:
            return here
        flag = torch.tensor(float(here), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    @staticmethod
    def is_due(step: int, *every: int | None) -> bool:
        return any(number is not None and step % number == 0 for number in every)


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
