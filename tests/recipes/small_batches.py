"""Batches with random pixels, in the form that the loader delivers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streamvid.buckets.bucket import Bucket
from streamvid.loader.batch.batch import Batch
from streamvid.loader.options import Layout
from streamvid.recipes.small import SmallTraining
from streamvid.recipes.small.text_encoder import pad_states


def make_batch(
    size: tuple[int, int, int] = (5, 16, 24),
    text: tuple[str, ...] = ("a red bike", ""),
    layout: Layout = "BCTHW",
    seed: int = 0,
) -> Batch:
    pixels = torch.randint(
        0, 256, (len(text), 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    fields: dict[str, Any] = {
        "video": pixels.permute(["BCTHW".index(axis) for axis in layout]).contiguous(),
        "text": list(text),
        "sample_keys": [f"{seed}-{row}" for row in range(len(text))],
        "bucket": Bucket(*size),
        "fps": torch.full((len(text),), 24.0),
        "is_repeat": torch.zeros(len(text), dtype=torch.bool),
        "loss_weight": 1.0,
        "sample_seeds": [1000 * seed + row for row in range(len(text))],
        "layout": layout,
    }
    return Batch(fields)


def add_media(batch: Batch, **media: Tensor) -> Batch:
    """Return the batch with conditioning inputs for all samples."""
    there = {name: torch.ones(len(batch.text), dtype=torch.bool) for name in media}
    return batch.with_fields({"media": media, "media_present": there})


def add_audio(batch: Batch, present: tuple[bool, ...]) -> Batch:
    """Return the batch with audio as preset ltx-2 delivers it, at 24 frames per second."""
    count = batch.bucket.num_frames * 16000 // 25
    audio = 0.3 * torch.randn(len(present), 2, count, generator=torch.Generator().manual_seed(3))
    there = torch.tensor(present)
    return batch.with_fields({"audio": audio * there.view(-1, 1, 1), "audio_present": there})


def encoded(module: SmallTraining, batch: Batch) -> Batch:
    """Return the batch with the results of `encode`, as the trainer adds them."""
    made = module.encode(batch)
    states, mask = pad_states(made["text_states"])  # type: ignore[arg-type]
    return batch.with_fields({"latents": made["latents"], "text_states": states, "text_states_mask": mask})


def wake(module: nn.Module) -> None:
    """Add noise to all parameters, so that none is zero and each one affects the output."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
