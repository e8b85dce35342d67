"""Conditioning inputs of a batch, as floats: control videos, masks and reference images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from streamvid.errors import ConfigError

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_WHITE = 128


def channels_first(batch: Batch, video: Tensor) -> Tensor:
    """Rearrange a video from the batch's layout to (B, C, T, H, W)."""
    return video.permute(0, *(1 + batch.layout[1:].index(axis) for axis in "CTHW"))


def video_input(batch: Batch, name: str, like: Tensor) -> Tensor | None:
    """Return a control video with values in -1..1 and the shape of `like`, or None if the batch lacks this input.

    All values are 0 for samples that lack this input.
    like: tensor (B, 3, T, H, W).
    Raises ConfigError if the input is not a video of this shape.
    """
    if not _has(batch, name):
        return None
    found = channels_first(batch, batch.normalized(torch.float32, medium=name))
    if found.shape != like.shape:
        raise ConfigError(
            f"the conditioning input {name} has shape {tuple(found.shape)}, but a video of shape {tuple(like.shape)} "
            f"is required; shard with --media video:{name}=COLUMN"
        )
    return found * _present(batch, name).to(found).view(-1, 1, 1, 1, 1)


def mask_input(batch: Batch, name: str, like: Tensor) -> Tensor | None:
    """Return a mask (B, 1, T, H, W) with values 0 and 1, or None if the batch lacks this input.

    Stored values of 128 or more become 1, and smaller values become 0. For samples that lack a mask, all values are 1.
    Raises ConfigError if the largest stored value is between 1 and 127, as in masks that store class ids.
    """
    if not _has(batch, name):
        return None
    values = _first_channel(batch, name)
    largest = int(values.max())
    if 0 < largest < _WHITE:
        raise ConfigError(
            f"the conditioning input {name} has values up to {largest}, but a mask must be white (255) where the "
            "model generates pixels and black (0) where it keeps the control video; store the mask with these values"
        )
    mask = (values >= _WHITE).to(like)
    mask = torch.where(_present(batch, name).view(-1, 1, 1, 1, 1), mask, 1.0)
    return mask.expand(-1, -1, like.shape[2], -1, -1)


def image_inputs(batch: Batch, name: str, like: Tensor) -> Tensor | None:
    """Return reference images (B, 3, N, H, W) with values in -1..1, or None if the batch lacks this input.

    Raises ConfigError if a sample lacks an image that other samples have.
    """
    if not _has(batch, name):
        return None
    if not bool(_present(batch, name, is_all=True).all()):
        raise ConfigError(
            f"a sample lacks images for the conditioning input {name}, but all samples need the same number of images; "
            f"shard with --media image:{name}=COLUMN (a question mark after the name would allow missing images) and "
            f"with equally long lists, or omit {name} from data.extra_inputs to train without it"
        )
    values = batch.normalized(torch.float32, medium=name)
    if values.ndim == 6:
        per_image = [channels_first(batch, values[:, i])[:, :, :1] for i in range(values.shape[1])]
        return torch.cat(per_image, dim=2).to(like)
    return channels_first(batch, values)[:, :, :1].to(like)


def _has(batch: Batch, name: str) -> bool:
    return name in getattr(batch, "media", {})


def _first_channel(batch: Batch, name: str) -> Tensor:
    """Return a mask (B, 1, T, H, W). If the mask is stored as pictures, take their first channel."""
    return channels_first(batch, batch.media[name])[:, :1]


def _present(batch: Batch, name: str, is_all: bool = False) -> Tensor:
    """Return a bool tensor (B,) that is True for samples with an image for the input `name`.

    If `is_all` is True, a sample must have all of its images for this input.
    """
    found: Tensor = batch.media_present[name].to(batch.media[name].device)
    return found if found.ndim == 1 else found.all(dim=1) if is_all else found.any(dim=1)
