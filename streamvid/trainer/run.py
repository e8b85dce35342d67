"""What a run holds from its first step to its last, the same on every rank but for the batches."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn

from streamvid.errors import ConfigError, StreamvidError
from streamvid.modules.build import build_module
from streamvid.modules.optimizer import Ema, build_optimizer
from streamvid.modules.summary import summarize
from streamvid.plan.hashing import hash64
from streamvid.trainer.checkpoint import Checkpoints, Progress
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.data import BatchClock, Batches
from streamvid.trainer.evaluate import evaluate, save_samples
from streamvid.trainer.launch import make_accelerator, recompute_function
from streamvid.trainer.metrics import append_metrics, drop_metrics_after, flat, merge_told, plain
from streamvid.trainer.tasks import Step, find_task

if TYPE_CHECKING:
    from streamvid.buckets.bucket import Bucket
    from streamvid.loader.batch.batch import Batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMade:
    """What one step of the optimizer was made of, on this rank; tensors are still on their device."""

    loss: Tensor
    figures: dict[str, Tensor]
    grad_norm: Tensor | float | None
    lr: float
    num_samples: int
    num_tokens: int


class Run:
    """Raises ConfigError and StateError before anything is written."""

    def __init__(
        self, config: TrainConfig, module: nn.Module | None, loader: Batches | None,
        eval_loader: Iterable[Batch] | None, open_loaders: Callable[[nn.Module], tuple[Batches, Iterable[Batch]]],
    ) -> None:  # fmt: skip
        self.config, self.last = config, dict[str, Any]()
        task = find_task(config.task)
        if task.sidecar == "write":
            raise ConfigError(f"task is {config.task!r}, which trains nothing; use streamvid.trainer.encode")
        self.accelerator = accelerator = make_accelerator(config)
        self.is_main: bool = accelerator.is_main_process
        self.checkpoints = Checkpoints(config, accelerator)
        folder = self.checkpoints.find()
        # No rank may write before every rank has looked.
        accelerator.wait_for_everyone()
        if module is None:
            module = build_module(
                config.model, config.lora, config.recompute, task=config.task, seed=config.seed,
                checkpoint_function=recompute_function(accelerator),
            )  # fmt: skip
        if loader is None:
            loader, eval_loader = open_loaders(module)
        self.loader = loader
        self._of_buckets: list[tuple[Bucket, Tensor, int]] = []
        optimizer = build_optimizer(config.optimizer, module)
        _log.info("%s", summarize(module))
        self.step_module, self.optimizer = accelerator.prepare(Step(module, task), optimizer)
        self.parameters = [one for one in self.step_module.parameters() if one.requires_grad]
        decay = config.optimizer.ema_decay
        self.ema = None if decay is None else Ema(accelerator.unwrap_model(self.step_module).model, decay)
        wanted = config.eval.num_batches if config.eval.steps or config.eval.sample_steps else 0
        held_out = itertools.islice(eval_loader or (), wanted) if wanted else ()
        self.fixed = [batch.clone() for batch in held_out]
        self.progress = self.checkpoints.load(folder, self.step_module, self.ema, loader)
        for group in self.optimizer.param_groups:  # the checkpoint's are as its config said
            group |= {name: value for name, value in config.optimizer.arguments.items() if name in group}
        self.num_steps = self._num_steps()
        if self.is_main:
            self.checkpoints.describe()
            drop_metrics_after(config.output, self.progress.step if folder is not None else -1)
        if config.trackers:
            told = {"task": config.task, "seed": config.seed, "dataset": str(config.dataset)}
            accelerator.init_trackers("streamvid", config=told)

    def _num_steps(self) -> int:
        if self.config.max_steps is not None:
            return self.config.max_steps
        loader, epochs = self.loader, self.config.num_epochs or 1
        if loader.epoch >= epochs:
            return self.progress.step
        # From where the loader stands, because other ranks or batch sizes make other steps of what is left.
        later = loader.num_steps(epochs) - loader.num_steps(loader.epoch + 1)
        return self.progress.step + (loader.num_steps_left + later) // self.config.accumulate

    def take_step(self, clock: BatchClock, number: int) -> StepMade:
        """One step of the optimizer, the `number`th, over `accumulate` batches."""
        config, accelerator = self.config, self.accelerator
        loss, figures, samples, tokens, norm = torch.zeros((), device=accelerator.device), {}, 0, 0, None
        lr = config.optimizer.lr_at(number, self.num_steps)
        for micro_step in range(config.accumulate):
            batch = clock.next_batch().to(accelerator.device)
            # What a module draws by itself, as its dropout, is then the same in a resumed run.
            set_seed(hash64(config.seed, number, micro_step, accelerator.process_index) & 0x7FFFFFFF)
            with accelerator.accumulate(self.step_module):
                for group in self.optimizer.param_groups:  # before `backward`, in which DeepSpeed steps
                    group["lr"] = lr
                found = self.step_module(batch)
                mean = found.pop("loss").float().mean()
                # The loader's weights make what accelerate averages, over ranks and batches, the mean of all samples.
                accelerator.backward(mean * batch.loss_weight)
                if accelerator.sync_gradients:
                    largest = config.optimizer.grad_clip or float("inf")
                    norm = accelerator.clip_grad_norm_(self.parameters, largest)
                self.optimizer.step()
                self.optimizer.zero_grad()
            loss += mean.detach() * batch.loss_weight / config.accumulate
            figures = {name: torch.as_tensor(value).detach().float().mean() for name, value in found.items()}
            self._of_buckets.append((batch.bucket, mean.detach(), len(batch.sample_keys)))
            samples += len(batch.sample_keys)
            tokens += len(batch.sample_keys) * batch.bucket.tokens
        if self.ema is not None:
            self.ema.update()
        return StepMade(loss, figures, norm, lr, samples, tokens)

    def report(self, progress: Progress, made: StepMade | None = None, spent: dict[str, float] | None = None) -> None:
        """Add a line to metrics.jsonl and the trackers, with what is due of evaluation; every rank calls it."""
        step, config = progress.step, self.config
        record: dict[str, Any] = {"step": step}
        if made is not None and spent is not None:
            record |= {"loss": 0.0, "lr": made.lr, **self._told(progress, made, spent), "step": step}
            if not math.isfinite(record["loss"]):
                raise StreamvidError(
                    f"loss is {record['loss']} at step {step}; lower optimizer.lr or optimizer.grad_clip"
                )
        if self.fixed and config.eval.steps and (step in (0, self.num_steps) or step % config.eval.steps == 0):
            record["eval_loss"] = evaluate(self.accelerator, self.step_module, self.fixed)
        if self.fixed and step and self.is_due(step, config.eval.sample_steps):
            save_samples(self.accelerator, self.step_module, self.fixed[0], config.output / "samples", f"step-{step}")
        self.last |= record
        if self.is_main and len(record) > 1:
            append_metrics(config.output, plain(record))
            short = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in record.items()}
            _log.info("%s", ", ".join(f"{k} {v}" for k, v in short.items() if k[:5] != "data_" or k.endswith("share")))
        self.accelerator.log(flat(record), step=step)

    def _told(self, progress: Progress, made: StepMade, spent: dict[str, float]) -> dict[str, Any]:
        """What all ranks tell of the steps since the last line, as one record."""
        buckets = [(one.id, float(loss), count, one.tokens) for one, loss, count in self._of_buckets]
        self._of_buckets.clear()
        spent = spent | {"step_seconds": round(spent["seconds"] * self.config.accumulate / len(buckets), 5)}
        told = {"loss": float(made.loss), "figures": {name: float(one) for name, one in made.figures.items()}}
        told |= {"buckets": buckets, "spent": spent, "samples": progress.num_samples, "tokens": progress.num_tokens}
        norm = {} if made.grad_norm is None else {"grad_norm": float(made.grad_norm)}
        return merge_told(gather_object([told])) | norm

    def save(self, progress: Progress) -> None:
        """Weights and state; every rank calls it."""
        name = f"epoch-{self.loader.epoch}" if self.ends_epoch else f"step-{progress.step}"
        self.checkpoints.save(name, self.step_module, self.ema, self.total(progress), self.loader.state_dict())

    @property
    def ends_epoch(self) -> bool:
        """Whether an epoch has just ended that is to be saved."""
        return self.config.save_steps is None and self.loader.num_steps_left == 0

    def total(self, progress: Progress) -> Progress:
        """What all ranks did together."""
        counts = gather_object([(progress.num_samples, progress.num_tokens)])
        return Progress(progress.step, sum(one[0] for one in counts), sum(one[1] for one in counts))

    def any_rank(self, here: bool) -> bool:
        """Whether `here` holds on a rank, so that all act on a signal at the same step."""
        if self.accelerator.num_processes == 1:
            return here
        flag = torch.tensor(float(here), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def profiler(self) -> AbstractContextManager[Any]:
        """torch's profiler over some steps after the first, its traces in OUTPUT/profile; or nothing."""
        return self.accelerator.profile() if self.config.profile_steps else nullcontext()

    def close(self) -> None:
        self.accelerator.end_training()

    @staticmethod
    def is_due(step: int, *every: int | None) -> bool:
        return any(number is not None and step % number == 0 for number in every)
