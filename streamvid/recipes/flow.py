"""Rectified flow: the straight path between latents and noise, the loss of a model of its velocity, and a sampler.

x_t = (1 - t)·x_0 + t·noise        velocity = noise - x_0        t = shifted(sigmoid(normal)), most often near 1/2

Noise and time are drawn per sample from a seed, so that the loss of a sample does not depend on its batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x_t (B, C, t, h, w), times (B,)) → velocity, in the shape of x_t."""


def shifted(times: Tensor, shift: float) -> Tensor:
    """Move times towards the noise for shift > 1: large latents stay recognizable under more noise (1: unchanged)."""
    return shift * times / (1 + (shift - 1) * times)


def draw_noise_and_times(
    shape: Sequence[int], seeds: Sequence[int], device: torch.device | str, shift: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw normal noise (B, *shape) and logit-normal times (B,) in 0..1, both float32, row i from seeds[i] only.

    shape: of the latents of one sample.   seeds: B integers from 0 to 2**63 - 1.   device: device that draws them;
    different kinds of devices draw different numbers.
    """
    noise = torch.empty(len(seeds), *shape, device=device)
    logits = torch.empty(len(seeds), device=device)
    for row, seed in enumerate(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        logits[row : row + 1].normal_(generator=generator)
        noise[row].normal_(generator=generator)
    return noise, shifted(torch.sigmoid(logits), shift)


def rectified_flow_loss(velocity: Velocity, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return the mean squared error of the model's velocity per sample: (B,) float32, at any precision of the model.

    latents: (B, C, t, h, w); noise: the same shape; times: (B,).
    """
    latents, t = latents.float(), times.float()[:, None, None, None, None]
    predicted = velocity((1 - t) * latents + t * noise, times)
    return (predicted.float() - (noise - latents)).square().flatten(1).mean(dim=1)


@torch.no_grad()
def sample_by_euler(velocity: Velocity, noise: Tensor, num_steps: int, shift: float = 1.0) -> Tensor:
    """Follow the velocity from noise (B, C, t, h, w) to latents, float32, in `num_steps` straight steps."""
    times = shifted(torch.linspace(1, 0, num_steps + 1, device=noise.device), shift)
    x = noise.float()
    for now, then in itertools.pairwise(times):
        x = x + (then - now) * velocity(x, now.expand(len(x))).float()
    return x


def guided(with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
    """Apply classifier-free guidance: move from the velocity without text toward the one with it, beyond it above 1."""
    return without + guidance * (with_text - without)
