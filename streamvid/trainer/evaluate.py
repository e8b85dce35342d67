"""Evaluation of a model: its loss on fixed held-out batches, and videos that it generates."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from streamvid.errors import ConfigError
from streamvid.modules.build import evaluating
from streamvid.plan.hashing import hash64
from streamvid.video.encode.showing import contact_sheet, movie

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_log = logging.getLogger(__name__)


def evaluate(accelerator: Accelerator, module: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the mean loss per sample over the batches of all ranks.

    If the module returns a loss per sample, repeated samples are left out.
    """
    total = torch.zeros(2, device=accelerator.device)
    with evaluating(module):
        for number, batch in enumerate(one.to(accelerator.device) for one in batches):
            set_seed(hash64(number, accelerator.process_index) & 0x7FFFFFFF)  # for the module's own random numbers
            losses = module(batch, validates=True)["loss"].float()
            count = (~batch.is_repeat).float() if losses.ndim else losses.new_tensor(len(batch.sample_keys))
            total += torch.stack([(losses * count).sum(), count.sum()])
    loss_sum, count_sum = accelerator.reduce(total, reduction="sum").tolist()
    return float(loss_sum / count_sum) if count_sum else float("nan")


def save_samples(accelerator: Accelerator, module: nn.Module, batch: Batch, folder: Path, name: str) -> None:
    """Write a contact sheet and a movie of the module's `sample` output. Every rank must call this function."""
    unwrapped = accelerator.unwrap_model(module)
    model = unwrapped.model
    if not hasattr(model, "sample"):
        raise ConfigError(
            f"eval.sample_steps is set, but {type(model).__name__} has no method `sample`; add the method, or "
            "set eval.sample_steps to null"
        )
    with evaluating(module), accelerator.autocast():
        set_seed(accelerator.process_index)
        video = model.sample(unwrapped.encoded(batch.to(accelerator.device)))
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        frames = video.permute(0, 2, 3, 4, 1).cpu().numpy()
        (folder / f"{name}.png").write_bytes(contact_sheet(frames))
        rate = float(batch.fps[0])
        (folder / f"{name}.mp4").write_bytes(movie(frames, 1.0 if math.isnan(rate) else rate))
        _log.info("saved samples: %s", folder / f"{name}.png")
