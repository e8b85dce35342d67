"""Evaluation of a model: its loss on fixed held-out batches, and videos that it generates."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.build import evaluating
from streamvid.plan.hashing import hash64
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.launch import has_sharded_weights
from streamvid.trainer.metrics import MetricLine
from streamvid.video.encode.showing import contact_sheet, movie

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_log = logging.getLogger(__name__)


def evaluate(accelerator: Accelerator, module: nn.Module, batches: Sequence[Batch]) -> MetricLine:
    """Return metrics for metrics.jsonl. Each metric is a mean over all samples in the batches of all ranks.

    The metrics are eval_loss and eval_loss_of_bucket, which maps bucket ids to losses. Additional values from the
    module's `validate`, such as losses at fixed timesteps, are named eval_NAME. If the module returns one value per
    sample, repeated samples are omitted.
    """
    sums: list[HeldOut] = []
    with evaluating(module):
        for number, batch in enumerate(one.to(accelerator.device) for one in batches):
            set_seed(hash64(number, accelerator.process_index) & 0x7FFFFFFF)  # for the module's own random numbers
            figures = module(batch, validates=True)
            sums += [_held_out(name, torch.as_tensor(one).float(), batch) for name, one in figures.items()]
    merged: dict[tuple[str, str | None], list[HeldOut]] = {}
    for one in gather_object(sums):
        merged.setdefault((one.name, None), []).append(one)
        merged.setdefault((one.name, one.bucket_id), []).append(one)
    means = {key: _mean(some) for key, some in merged.items()}
    by_bucket = {bucket: means["loss", bucket] for name, bucket in sorted(merged, key=str) if bucket and name == "loss"}
    line = {f"eval_{name}": value for (name, bucket), value in means.items() if bucket is None}
    return {"eval_loss": math.nan, **line, "eval_loss_of_bucket": by_bucket}


@dataclass(frozen=True)
class HeldOut:
    """Sum of one metric over the samples in a held-out batch, and the number of these samples."""

    name: str
    bucket_id: str
    total: float
    count: float


def _held_out(name: str, values: Tensor, batch: Batch) -> HeldOut:
    count = (~batch.is_repeat).float() if values.ndim else values.new_tensor(len(batch.sample_keys))
    return HeldOut(name, batch.bucket.id, float((values * count).sum()), float(count.sum()))


def _mean(sums: Sequence[HeldOut]) -> float:
    count = math.fsum(one.count for one in sums)
    return math.fsum(one.total for one in sums) / count if count else math.nan


def prompted(batch: Batch, prompts: Sequence[str]) -> Batch:
    """Return a batch with one sample per prompt and fixed seeds.

    All other values are copied from the first sample in `batch`.
    """
    rows = len(prompts)

    def repeated(tensor: Tensor) -> Tensor:
        return tensor[:1].expand(rows, *tensor.shape[1:])

    lists = {name: [value[0]] * rows for name, value in batch.items() if isinstance(value, list) and value}
    return batch.map_tensors(repeated).with_fields({**lists, "text": list(prompts), "sample_seeds": list(range(rows))})


def save_samples(accelerator: Accelerator, module: nn.Module, batch: Batch, folder: Path, name: str) -> None:
    """Write the output of the module's `sample` as a contact sheet and as a video.

    Every rank must call this function.
    """
    # Sharded weights are gathered by the prepared module. Otherwise, ranks should not wait for each other.
    renders = module if has_sharded_weights(accelerator) else accelerator.unwrap_model(module)
    with evaluating(module), accelerator.autocast():
        set_seed(accelerator.process_index)
        video = renders(batch.to(accelerator.device), renders=True)["video"]
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        frames = video.permute(0, 2, 3, 4, 1).cpu().numpy()
        (folder / f"{name}.png").write_bytes(contact_sheet(frames))
        rate = float(batch.fps[0])
        (folder / f"{name}.mp4").write_bytes(movie(frames, 1.0 if math.isnan(rate) else rate))
        _log.info("saved samples: %s", folder / f"{name}.png")


def require_sampling(config: TrainConfig, module: nn.Module) -> None:
    """Raise ConfigError if samples are configured, but the module or the task cannot generate them.

    Log a warning if there are prompts, but no samples are generated.
    """
    if config.eval.prompts and config.eval.sample_steps is None:
        _log.warning(
            "eval.prompts is set, but eval.sample_steps is null, so no videos are generated; add "
            "eval.sample_steps=500 to generate videos every 500 steps, or omit eval.prompts"
        )
    if config.eval.sample_steps is not None and not hasattr(module, "sample"):
        raise ConfigError(
            f"eval.sample_steps is set, but {type(module).__name__} has no `sample` method; add the method, or "
            "set eval.sample_steps to null"
        )
    if config.eval.prompts and config.task == "sft:train":
        raise ConfigError(
            "eval.prompts is set, but task sft:train has no text encoders; omit eval.prompts to generate videos "
            "from the captions of held-out clips"
        )
