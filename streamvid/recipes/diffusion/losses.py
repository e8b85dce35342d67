"""Losses of diffusion models, float32 per sample at any precision of the model.

flow matching   x_t = (1 - t)·x_0 + t·noise       the model predicts noise - x_0
v-prediction    x_t = √a·x_0 + √(1 - a)·noise     the model predicts √a·noise - √(1 - a)·x_0, a = alphas_cumprod[t]
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from streamvid.recipes.diffusion.config import Weighting
from streamvid.recipes.diffusion.times import shifted


def over(times: Tensor, like: Tensor) -> Tensor:
    """Reshape values (B,) so that they broadcast over a tensor (B, …)."""
    return times.float().view(-1, *[1] * (like.ndim - 1))


def mix(latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Mix latents with noise: return the points at the given times on straight paths from the latents to the noise."""
    t = over(times, latents)
    return (1 - t) * latents + t * noise


def squared_error(predicted: Tensor, target: Tensor, given: Tensor | None = None) -> Tensor:
    """Return the mean squared error per sample, with shape (B,), for tensors (B, C, t, h, w).

    given: bool (B,), True for samples whose first latent frame is excluded because it is an input to the model.
    """
    errors = (predicted.float() - target).square()
    if given is None or not bool(given.any()):
        return errors.flatten(1).mean(dim=1)
    frames = errors.mean(dim=(1, 3, 4))
    kept = torch.ones_like(frames)
    kept[:, 0] = (~given).float()
    return (frames * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


def weights_of(times: Tensor, weighting: Weighting, shift: float = 1.0) -> Tensor:
    """Return the loss weight for each time, with shape (B,).

    "cosmap" and "sigma-sqrt" are the weightings of Stable Diffusion 3 (`compute_loss_weighting_for_sd3` in diffusers
    0.42.1). "bell" is the weighting of DiffSynth-Studio (`set_training_weight`, diffsynth/diffusion/flow_match.py at
    038bad0): a Gaussian around t = 0.5 that is zero at t = 1 and has a mean of 1 over 1000 steps with this `shift`.
    """
    match weighting:
        case "none":
            return torch.ones_like(times)
        case "sigma-sqrt":
            return times**-2.0
        case "cosmap":
            return 2 / (math.pi * (1 - 2 * times + 2 * times**2))
        case "bell":
            steps = shifted(torch.linspace(1, 0, 1001, dtype=torch.float64, device=times.device)[:-1], shift)
            lowest = _bell(steps).min()
            return ((_bell(times.double()) - lowest) * 1000 / (_bell(steps) - lowest).sum()).float()
        case _:
            assert_never(weighting)


def _bell(times: Tensor) -> Tensor:
    return torch.exp(-2 * (times - 0.5) ** 2)
