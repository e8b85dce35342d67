"""Rectified flow: straight paths from latents to noise, the loss of a model that predicts velocities, and a sampler.

x_t = (1 - t)·x_0 + t·noise        velocity = noise - x_0        t = shifted(sigmoid(normal)), most often near 1/2

Noise and time are drawn from each sample's own seed, so its loss does not depend on the rest of its batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streamvid.recipes.diffusion.times import shifted

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x_t (B, C, t, h, w), times (B,)) → velocity, in the shape of x_t."""


def draw_noise_and_times(
    shape: Sequence[int], seeds: Sequence[int], device: torch.device | str, shift: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw normal noise (B, *shape) and logit-normal times (B,) in 0..1, both float32. Row i depends only on seeds[i].

    shape: latent shape of one sample.
    seeds: B integers from 0 to 2**63 - 1.
    device: device that draws the numbers; different types of devices draw different numbers.
    shift: time shift; values above 1 move the times toward the noise.
    """
    noise = torch.empty(len(seeds), *shape, device=device)
    logits = torch.empty(len(seeds), device=device)
    for row, seed in enumerate(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        logits[row : row + 1].normal_(generator=generator)
        noise[row].normal_(generator=generator)
    return noise, shifted(torch.sigmoid(logits), shift)


def rectified_flow_loss(velocity: Velocity, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return the predicted velocity's mean squared error for each sample, with shape (B,). The error is always float32.

    latents, noise: tensors (B, C, t, h, w).
    times: tensor (B,) with values in 0..1.
    """
    latents, t = latents.float(), times.float()[:, None, None, None, None]
    predicted = velocity((1 - t) * latents + t * noise, times)
    return (predicted.float() - (noise - latents)).square().flatten(1).mean(dim=1)


@torch.no_grad()
def sample_by_euler(velocity: Velocity, noise: Tensor, num_steps: int, shift: float = 1.0) -> Tensor:
    """Integrate the velocity from noise (B, C, t, h, w) to float32 latents in `num_steps` Euler steps."""
    times = shifted(torch.linspace(1, 0, num_steps + 1, device=noise.device), shift)
    x = noise.float()
    for now, then in itertools.pairwise(times):
        x = x + (then - now) * velocity(x, now.expand(len(x))).float()
    return x


def guided(with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
    """Combine the velocities with and without text, using classifier-free guidance.

    A guidance scale of 0 gives `without`, 1 gives `with_text`, and a larger scale extrapolates.
    """
    return without + guidance * (with_text - without)
