"""Rectified flow: the straight way between pixels and noise, and the loss of a model that predicts its direction.

x_t = (1 - t)·x_0 + t·noise        target velocity = noise - x_0        t = sigmoid(normal), most often near 1/2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor, Sequence[str]], Tensor]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def seeded_generator(device: torch.device, *parts: int) -> torch.Generator:
    """A generator for this place of this run, such as (seed, step, rank): a resumed run draws what it would have."""
    state = 0
    for part in parts:
        state = (state ^ part) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    # torch wants a signed 64-bit seed.
    return torch.Generator(device).manual_seed(state >> 1)


def draw_noise_and_times(video: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal noise shaped as the video (B, C, T, H, W), and logit-normal times (B,) in 0..1; both float32."""
    device = generator.device
    times = torch.sigmoid(torch.randn(video.shape[0], generator=generator, device=device))
    return torch.randn(video.shape, generator=generator, device=device), times


def rectified_flow_loss(model: Velocity, video: Tensor, text: Sequence[str], noise: Tensor, times: Tensor) -> Tensor:
    """The mean squared error of the model's velocity, a sample: (B,) float32.

    video: float (B, C, T, H, W) in -1..1; noise: the same shape; times: (B,).
    """
    t = times[:, None, None, None, None]
    predicted = model((1 - t) * video + t * noise, times, text)
    return (predicted.float() - (noise - video).float()).square().mean(dim=(1, 2, 3, 4))
