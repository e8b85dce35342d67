"""State of a run from its first step to its last. It is the same on every rank except for the batches."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn

from streamvid.errors import ConfigError, StreamvidError
from streamvid.modules.build import build_module
from streamvid.modules.optimizer import Ema, build_optimizer
from streamvid.modules.summary import format_table, summarize
from streamvid.plan.hashing import hash64
from streamvid.trainer.checkpoint import Checkpoints, TrainProgress, require_output
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import BatchClock, Batches, check_features, open_loaders
from streamvid.trainer.evaluate import evaluate, prompted, require_sampling, save_samples
from streamvid.trainer.launch import accelerating, checkpoint_function, has_sharded_weights
from streamvid.trainer.metrics import (
    BucketLoss,
    MetricLine,
    RankReport,
    append_metrics,
    drop_metrics_after,
    flat,
    merge_reports,
    readable,
)
from streamvid.trainer.tasks import TaskModule, find_task
from streamvid.trainer.unused import allow_unused, require_gradients

if TYPE_CHECKING:
    from streamvid.buckets.bucket import Bucket
    from streamvid.loader.batch.batch import Batch

_log = logging.getLogger(__name__)


@dataclass
class StepResult:
    """Result of one optimizer step on this rank. Tensors stay on their device until they are reported."""

    loss: Tensor
    lr: float
    figures: Mapping[str, Tensor] = field(default_factory=dict)
    grad_norm: Tensor | float | None = None
    num_samples: int = 0
    num_tokens: int = 0


class Run:
    """Training run. Its constructor raises ConfigError and StateError before anything is written.

    stack: closes everything that the run opens.
    module, loader, eval_loader: objects to use in place of the configured module and loaders.
    """

    def __init__(
        self,
        config: TrainConfig,
        stack: ExitStack,
        module: nn.Module | None = None,
        loader: Batches | None = None,
        eval_loader: Iterable[Batch] | None = None,
    ) -> None:
        self.config = config
        self.last: MetricLine = {}
        self._batches: list[tuple[Bucket, Tensor, int]] = []
        task = find_task(config.task)
        if task.features == "write":
            raise ConfigError(f"task is {config.task!r}, which trains nothing; use `streamvid encode`")
        self.accelerator = accelerator = stack.enter_context(accelerating(config))
        self.is_main: bool = accelerator.is_main_process
        self.checkpoints = Checkpoints(config, accelerator)
        require_output(config.output)
        folder = self.checkpoints.find()
        # No rank may write before every rank has checked.
        accelerator.wait_for_everyone()
        self.prompts = config.eval.read_prompts()
        opens_data = loader is None
        if loader is None:
            loader, eval_loader = stack.enter_context(open_loaders(config))
        if folder is None:
            _require_steps(config, loader)
        if module is None:
            recompute = checkpoint_function(accelerator)
            module = build_module(config.model, task=config.task, seed=config.seed, checkpoint_function=recompute)
        require_sampling(config, module)
        if opens_data:
            check_features(config, module, self.is_main)
        self.checkpoints.identify(module)
        optimizer = build_optimizer(config.optimizer, module)
        self.loader = loader
        _log.info("%s", format_table(summarize(module)))
        allow_unused(accelerator, config.accelerate.find_unused_parameters, module)
        self.module, self.optimizer = accelerator.prepare(TaskModule(module, task), optimizer)
        self.parameters = [one for one in self.module.parameters() if one.requires_grad]
        decay = config.optimizer.ema_decay
        self.ema = None if decay is None else Ema(accelerator.unwrap_model(self.module).model, decay)
        self.held_out = self._held_out(eval_loader)
        self.progress = self.checkpoints.load(folder, self.module, self.ema, loader)
        for group in self.optimizer.param_groups:  # the checkpoint restored the values of its own configuration
            group |= {name: value for name, value in config.optimizer.arguments.items() if name in group}
        self.num_steps = self._num_steps()
        self._begin_output(is_resumed=folder is not None)

    def _held_out(self, loader: Iterable[Batch] | None) -> list[Batch]:
        settings = self.config.eval
        wanted = settings.num_batches if settings.steps or settings.sample_steps else 0
        return [batch.clone() for batch in itertools.islice(loader or (), wanted)] if wanted else []

    def _begin_output(self, is_resumed: bool) -> None:
        config = self.config
        if self.is_main:
            self.checkpoints.describe()
            drop_metrics_after(config.output, self.progress.step if is_resumed else -1)
        if config.logging.trackers:
            settings = {"task": config.task, "seed": config.seed, "dataset": str(config.data.dataset)}
            self.accelerator.init_trackers("streamvid", config=settings)

    def _num_steps(self) -> int:
        if self.config.max_steps is not None:
            return self.config.max_steps
        loader, epochs = self.loader, self.config.num_epochs or 1
        if loader.epoch >= epochs:
            return self.progress.step
        # Counted from the loader's position, because another number of ranks or batch size changes the remaining steps.
        later = loader.num_steps(epochs) - loader.num_steps(loader.epoch + 1)
        return self.progress.step + (loader.num_steps_left + later) // self.config.data.accumulate

    def take_step(self, clock: BatchClock, number: int) -> StepResult:
        """Take optimizer step `number`, accumulating gradients over `data.accumulate` batches."""
        config, accelerator = self.config, self.accelerator
        result = StepResult(torch.zeros((), device=accelerator.device), config.optimizer.lr_at(number, self.num_steps))
        for micro_step in range(config.data.accumulate):
            batch = clock.next_batch().to(accelerator.device)
            # The module's own random numbers, such as dropout, are then the same in a resumed run.
            set_seed(hash64(config.seed, number, micro_step, accelerator.process_index) & 0x7FFFFFFF)
            with accelerator.accumulate(self.module):
                for group in self.optimizer.param_groups:  # before `backward`, in which DeepSpeed steps
                    group["lr"] = result.lr
                figures = self.module(batch)
                mean = figures.pop("loss").float().mean()
                # accelerate averages over ranks and batches; the loader's weights make this the mean of all samples.
                accelerator.backward(mean * batch.loss_weight)
                if accelerator.sync_gradients:
                    if number == self.progress.step + 1:
                        require_gradients(self.module)
                    largest = config.optimizer.grad_clip or float("inf")
                    result.grad_norm = accelerator.clip_grad_norm_(self.parameters, largest)
                self.optimizer.step()
                self.optimizer.zero_grad()
            result.loss += mean.detach() * batch.loss_weight / config.data.accumulate
            result.figures = {name: torch.as_tensor(one).detach().float().mean() for name, one in figures.items()}
            num_samples = len(batch.sample_keys)
            self._batches.append((batch.bucket, mean.detach(), num_samples))
            result.num_samples += num_samples
            result.num_tokens += num_samples * batch.bucket.tokens
        if self.ema is not None:
            self.ema.update()
        return result

    def report(
        self, progress: TrainProgress, made: StepResult | None = None, spent: Mapping[str, float] | None = None
    ) -> None:
        """Evaluate the model if an evaluation is due, and add a line to metrics.jsonl and the trackers.

        Every rank must call this method.
        """
        step, settings = progress.step, self.config.eval
        line: MetricLine = {"step": step}
        if made is not None and spent is not None:
            line |= {"loss": 0.0, "lr": made.lr, **self._merged(progress, made, spent), "step": step}
            if not math.isfinite(line["loss"]):
                raise StreamvidError(
                    f"loss is {line['loss']} at step {step}; lower optimizer.lr, or set a lower optimizer.grad_clip"
                )
        is_end = step in (0, self.num_steps)
        if self.held_out and settings.steps and (is_end or self.is_due(step, settings.steps)):
            line |= evaluate(self.accelerator, self.module, self.held_out)
        self.last |= line
        if self.is_main and len(line) > 1:
            append_metrics(self.config.output, line)
            _log.info("%s", readable(line, self.num_steps))
        self.accelerator.log(flat(line), step=step)

    def render(self, step: int) -> None:
        """Generate videos if they are due. Every rank must call this method, after saving.

        A failure is logged and does not end the run, because training does not depend on videos. Raises ConfigError if
        a required option is not set. If a failure occurs while weights are sharded, raises StreamvidError, because the
        other ranks would otherwise wait for this rank.
        """
        if not self.held_out or not self.is_due(step, self.config.eval.sample_steps):
            return
        try:
            self._save_samples(f"step-{step}")
        except ConfigError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if has_sharded_weights(self.accelerator):
                raise StreamvidError(
                    f"no samples were generated at step {step}: {reason}. With sharded weights (FSDP, ZeRO-3), a rank "
                    "cannot continue alone; fix the cause or set eval.sample_steps to null, then start the run again "
                    "to resume"
                ) from error
            _log.warning(
                "no samples were generated at step %d: %s; training continues. Stop the run (Ctrl-C saves it), fix "
                "the cause or set eval.sample_steps to null, and start it again to resume",
                step,
                reason,
            )
            _log.debug("generating samples failed at step %d", step, exc_info=True)

    def _save_samples(self, name: str) -> None:
        """Generate videos with the current weights and, if the run averages weights, with the averaged weights."""
        batch, folder = self.held_out[0], self.config.output / "samples"
        if self.prompts:
            batch = prompted(batch, self.prompts)
        save_samples(self.accelerator, self.module, batch, folder, name)
        if self.ema is not None:
            with self.ema.applied():
                save_samples(self.accelerator, self.module, batch, folder, f"{name}.ema")

    def _merged(self, progress: TrainProgress, made: StepResult, spent: Mapping[str, float]) -> MetricLine:
        """Merge the reports of all ranks since the last metrics line."""
        batches = [BucketLoss(one.id, float(loss), count, count * one.tokens) for one, loss, count in self._batches]
        self._batches.clear()
        step_seconds = round(spent["seconds"] * self.config.data.accumulate / len(batches), 5)
        report = RankReport(
            loss=float(made.loss),
            figures={name: float(one) for name, one in made.figures.items()},
            batches=batches,
            spent={**spent, "step_seconds": step_seconds},
            num_samples=progress.num_samples,
            num_tokens=progress.num_tokens,
        )
        line = merge_reports(gather_object([report]))
        return line if made.grad_norm is None else {**line, "grad_norm": float(made.grad_norm)}

    def save(self, progress: TrainProgress) -> None:
        """Save weights and state. Every rank must call this method."""
        name = f"epoch-{self.loader.epoch}" if self.ends_epoch else f"step-{progress.step}"
        self.checkpoints.save(name, self.module, self.ema, self.total(progress), self.loader.state_dict())

    @property
    def ends_epoch(self) -> bool:
        """True after the last step of an epoch, if the run saves after each epoch."""
        return self.config.checkpoints.steps is None and self.loader.num_steps_left == 0

    def total(self, progress: TrainProgress) -> TrainProgress:
        """Return the progress summed over all ranks."""
        counts = gather_object([(progress.num_samples, progress.num_tokens)])
        return TrainProgress(progress.step, sum(one[0] for one in counts), sum(one[1] for one in counts))

    def any_rank(self, here: bool) -> bool:
        """Return True if `here` is true on any rank, so that all ranks act on a signal at the same step."""
        if self.accelerator.num_processes == 1:
            return here
        flag = torch.tensor(float(here), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def profiler(self) -> AbstractContextManager[Any]:
        """Return torch's profiler, which writes traces to OUTPUT/profile, or an empty context if profiling is off."""
        return self.accelerator.profile() if self.config.logging.profile_steps else nullcontext()

    @staticmethod
    def is_due(step: int, *every: int | None) -> bool:
        return any(number is not None and step % number == 0 for number in every)


def _require_steps(config: TrainConfig, loader: Batches) -> None:
    """Raise ConfigError if a new run would end before its first step."""
    epochs = config.num_epochs or 1
    if config.max_steps is None and loader.num_steps(epochs) < config.data.accumulate:
        raise ConfigError(
            f"num_epochs={epochs}: the run would have no steps, because no bucket has enough samples for a step on "
            "all ranks; lower data.batch_size, data.max_tokens_per_batch or data.accumulate, or set num_epochs or "
            "max_steps to a higher number"
        )
