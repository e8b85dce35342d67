"""Latents of a diffusers VAE, normalized with the mean, standard deviation and scale from its config.

    normalized = (latents - latents_mean) · scaling_factor / latents_std

Wan, LTX and Mochi specify mean and standard deviation per channel; CogVideoX and HunyuanVideo specify a scale. The
formula is the inverse of the one that their pipelines in diffusers 0.42.1 apply before `vae.decode`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def normalize(vae: nn.Module, latents: Tensor) -> Tensor:
    """Convert latents (B, C, t, h, w) to float32, and normalize them."""
    config: Any = vae.config
    latents = latents.float()
    mean, std = _per_channel(vae, "latents_mean", latents), _per_channel(vae, "latents_std", latents)
    scale = getattr(config, "scaling_factor", None)
    if mean is not None:
        latents = latents - mean
    if scale is not None:
        latents = latents * scale
    return latents if std is None else latents / std


def encode_clips(vae: Any, video: Tensor, posterior: str, seeds: list[int]) -> Tensor:
    """Encode videos (B, 3, T, H, W) with values in -1..1 as normalized float32 latents (B, C, t, h, w).

    posterior: "mean" to use the mean of the posterior; "sample" to draw from the posterior with each sample's seed.
    """
    rows = []
    # One clip at a time, because the last bits depend on the batch size.
    for clip, seed in zip(video, seeds, strict=True):
        found = vae.encode(clip[None].to(vae.dtype)).latent_dist
        if posterior == "mean":
            rows.append(found.mode())
        else:
            noise = torch.randn(found.mean.shape, generator=torch.Generator().manual_seed(seed))
            rows.append(found.mean + found.std * noise.to(found.mean))
    return normalize(vae, torch.cat(rows))


def _per_channel(vae: nn.Module, name: str, latents: Tensor) -> Tensor | None:
    """Return a statistic of the VAE's latents from its config or buffers, or None if the VAE lacks the statistic.

    The result has shape (1, C, 1, 1, 1).
    """
    found = getattr(vae.config, name, None)
    if found is None:
        found = vae._buffers.get(name)
    if found is None:
        return None
    return torch.as_tensor(found, dtype=torch.float32, device=latents.device).view(1, -1, 1, 1, 1)
