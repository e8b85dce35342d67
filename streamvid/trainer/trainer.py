"""Training loop for a module, from batches to saved weights. accelerate handles processes, devices and precision."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.progress import Progress as ProgressBar
from torch import nn

from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import BatchClock, Batches
from streamvid.trainer.launch import StopRequest, stop_requests
from streamvid.trainer.run import Run

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    stopped_by: signal that ended the run early, or None if the run is complete.
    """

    output: Path
    step: int
    num_steps: int
    num_samples: int
    loss: float | None
    eval_loss: float | None
    stopped_by: signal.Signals | None


def train(
    config: TrainConfig,
    loader: Batches | None = None,
    eval_loader: Iterable[Batch] | None = None,
    module: nn.Module | None = None,
) -> TrainResult:
    """Train according to `config`, resuming from the checkpoint that `checkpoints.resume` selects, if any.

    loader, eval_loader: loaders to use instead of `config.data`; the caller closes them. With a loader but no
        eval_loader, the run trains without evaluation.
    module: training module to use instead of `config.model`.
    Ctrl-C, SIGTERM and SIGUSR1 end the run after the current step, with a checkpoint. Before the first step, Ctrl-C
    raises KeyboardInterrupt.
    Raises ConfigError for task "sft:data_process" or an invalid configuration, StateError for a checkpoint that does
    not match the run, StreamvidError if the loss is no longer finite, and the loader's errors.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(stop_requests())
        stop.has_progress = False
        run = Run(config, stack, module, loader, eval_loader)
        stack.callback(run.accelerator.end_training)
        return _loop(run, stop)


def _loop(run: Run, stop: StopRequest) -> TrainResult:
    config, progress = run.config, run.progress
    saved = progress
    if progress.step == 0 and not run.any_rank(stop.signal_number is not None):
        run.report(progress)
    stop.has_progress = True
    clock = BatchClock(run.loader)
    columns = (*ProgressBar.get_default_columns(), MofNCompleteColumn())
    is_shown = run.is_main and sys.stderr.isatty()
    bar = ProgressBar(*columns, console=Console(stderr=True), redirect_stdout=False, disable=not is_shown)
    bar_of_run = bar.add_task("train", total=run.num_steps, completed=progress.step)
    with bar, run.profiler() as profiler:
        while progress.step < run.num_steps and not run.any_rank(stop.signal_number is not None):
            made = run.take_step(clock, progress.step + 1)
            progress = progress.after(made.num_samples, made.num_tokens)
            is_last = progress.step == run.num_steps
            if is_last or run.is_due(progress.step, config.logging.steps, config.eval.steps, config.eval.sample_steps):
                run.report(progress, made, clock.take_fields())
            if is_last or run.is_due(progress.step, config.checkpoints.steps) or run.ends_epoch:
                run.save(progress)
                saved = progress
            run.render(progress.step)
            bar.advance(bar_of_run)
            if profiler is not None:
                profiler.step()
    if saved != progress:
        run.save(progress)
    is_stopped = progress.step < run.num_steps
    return TrainResult(
        output=config.output,
        step=progress.step,
        num_steps=run.num_steps,
        num_samples=run.total(progress).num_samples,
        loss=run.last.get("loss"),
        eval_loss=run.last.get("eval_loss"),
        # A rank without a signal of its own stops if another rank got one.
        stopped_by=signal.Signals(stop.signal_number or signal.SIGTERM) if is_stopped else None,
    )
