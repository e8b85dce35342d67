"""Rectified flow: the straight way between latents and noise, the loss of a model of its direction, and a sampler.

x_t = (1 - t)·x_0 + t·noise        velocity = noise - x_0        t = shifted(sigmoid(normal)), most often near 1/2

All of it is drawn sample by sample from a seed each, so that a sample's loss does not depend on the batch it is in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x_t (B, C, t, h, w), times (B,)) → velocity, shaped as x_t."""


def shifted(times: Tensor, shift: float) -> Tensor:
    """Times moved towards the noise for shift > 1: what many values say together outlives much noise (1: as it is)."""
    return shift * times / (1 + (shift - 1) * times)


def draw_noise_and_times(
    shape: Sequence[int], seeds: Sequence[int], device: torch.device | str, shift: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Normal noise (B, *shape) and logit-normal times (B,) in 0..1, both float32, row i from seeds[i] alone.

    shape: of one sample's latents.   seeds: B integers from 0 up to 2**63 - 1.   device: where they are drawn; the
    numbers differ between kinds of devices.
    """
    noise = torch.empty(len(seeds), *shape, device=device)
    logits = torch.empty(len(seeds), device=device)
    for row, seed in enumerate(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        logits[row : row + 1].normal_(generator=generator)
        noise[row].normal_(generator=generator)
    return noise, shifted(torch.sigmoid(logits), shift)


def rectified_flow_loss(velocity: Velocity, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """The mean squared error of the model's velocity, a sample: (B,) float32, whatever precision the model works in.

    latents: (B, C, t, h, w); noise: the same shape; times: (B,).
    """
    latents, t = latents.float(), times.float()[:, None, None, None, None]
    predicted = velocity((1 - t) * latents + t * noise, times)
    return (predicted.float() - (noise - latents)).square().flatten(1).mean(dim=1)


@torch.no_grad()
def sample_by_euler(velocity: Velocity, noise: Tensor, num_steps: int, shift: float = 1.0) -> Tensor:
    """From noise (B, C, t, h, w) along the velocity to latents, float32, in `num_steps` straight steps."""
    times = shifted(torch.linspace(1, 0, num_steps + 1, device=noise.device), shift)
    x = noise.float()
    for now, then in itertools.pairwise(times):
        x = x + (then - now) * velocity(x, now.expand(len(x))).float()
    return x


def guided(with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
    """Classifier-free guidance: from the velocity without text towards the one with it, and beyond for guidance > 1."""
    return without + guidance * (with_text - without)
