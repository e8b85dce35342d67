"""Random numbers for a training step, and the distribution of its times.

Every sample draws from its own seed, so its loss does not depend on the rest of its batch. An increasing function maps
uniform numbers to times, so a part of the distribution (such as that of one of two experts) can be drawn exactly.

    uniform number ─► quantile of the distribution ─► shift toward the noise ─► time in 0..1 (1: only noise)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamvid.recipes.diffusion.config import DiffusionConfig

_EDGE = 1e-5


@dataclass(frozen=True)
class NoiseDraw:
    """Random numbers for a batch.

    noise: float32 (B, C, t, h, w).
    times: float32 (B,) in 0..1.
    numbers: uniform numbers (B,) for other random choices that the model family makes.
    given: bool (B,), True for samples whose first frame is an input to the model.
    """

    noise: Tensor
    times: Tensor
    numbers: Tensor
    given: Tensor


def uniform_numbers(shape: Sequence[int], seeds: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw normal noise (B, *shape) and uniform numbers (B, 2). Row i depends only on seeds[i].

    The numbers are drawn on the CPU, so that they are the same on every device.
    """
    noise, numbers = torch.empty(len(seeds), *shape), torch.empty(len(seeds), 2)
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        numbers[row].uniform_(generator=generator)
        noise[row].normal_(generator=generator)
    return noise.to(device), numbers.to(device)


def times_of(
    numbers: Tensor, config: DiffusionConfig, shift: float, interval: tuple[float, float] = (0.0, 1.0)
) -> Tensor:
    """Map uniform numbers (B,) to times (B,) from the configured distribution, restricted to `interval`."""
    low, high = (_number_of(edge, config, shift) for edge in interval)
    numbers = (low + (high - low) * numbers).clamp(_EDGE, 1 - _EDGE)
    if config.time_sampling == "logit-normal":
        numbers = torch.sigmoid(config.logit_mean + config.logit_std * torch.special.ndtri(numbers))
    return shifted(numbers, shift)


def shifted(times: Tensor, shift: float) -> Tensor:
    """Return shifted times. A shift above 1 moves times toward the noise, because large latents need more noise."""
    return shift * times / (1 + (shift - 1) * times)


def _number_of(time: float, config: DiffusionConfig, shift: float) -> float:
    """Return the uniform number that `times_of` maps to `time`."""
    if not 0 < time < 1:
        return time
    time = time / (shift - (shift - 1) * time)
    if config.time_sampling == "uniform":
        return time
    normal = (math.log(time / (1 - time)) - config.logit_mean) / config.logit_std
    return 0.5 * (1 + math.erf(normal / math.sqrt(2)))


def scheduler_shift(config: Mapping[str, Any], num_tokens: int) -> float:
    """Return the time shift that a scheduler's config specifies: a constant, or a function of the token count.

    With `use_dynamic_shifting`, mu is linear in the number of tokens and the shift is exp(mu), as in
    `calculate_shift` and `time_shift` from diffusers 0.42.1 (pipelines/ltx/pipeline_ltx.py,
    scheduling_flow_match_euler_discrete.py).
    """
    if config.get("use_dynamic_shifting"):
        low, high = config["base_image_seq_len"], config["max_image_seq_len"]
        slope = (config["max_shift"] - config["base_shift"]) / (high - low)
        return math.exp(config["base_shift"] + slope * (num_tokens - low))
    return float(config.get("flow_shift") or config.get("shift") or 1.0)
