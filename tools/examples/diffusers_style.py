#!/usr/bin/env python3
"""Training script in the style of diffusers: its scheduler, its transformer and accelerate, but streamvid's batches.

    accelerate launch diffusers_style.py DATASET --steps 50 --output transformer/

Only the data code differs from the scripts of diffusers: it needs no Dataset, DataLoader, collate_fn or resize.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from torch import Tensor, nn

import streamvid


def encode_video(video: Tensor) -> Tensor:
    """Encode videos with shape (B, C, T, H, W) and values from -1 to 1 as latents, by averaging.

    The latents have shape (B, 3, 1 + (T - 1) / 4, H / 8, W / 8), as with AutoencoderKLWan. A real script calls
    `vae.encode(video).latent_dist.sample()`. Because of this shape, buckets have 4k + 1 frames.
    """
    first, rest = video[:, :, :1], video[:, :, 1:]
    frames = [first, nn.functional.avg_pool3d(rest, (4, 1, 1))] if rest.shape[2] else [first]
    return nn.functional.avg_pool3d(torch.cat(frames, dim=2), (1, 8, 8))


def encode_text(captions: list[str], dim: int, length: int = 16) -> Tensor:
    """Encode the bytes of captions as waves with shape (B, length, dim). A real script calls its T5 model here."""
    data = [caption.encode()[:length].ljust(length, b"\0") for caption in captions]
    codes = torch.tensor([list(text) for text in data], dtype=torch.float32)
    return torch.sin(codes[..., None] * torch.arange(1, dim + 1) / dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--output", type=Path, default=Path("transformer"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=4000, help="tokens per batch, each 4 x 16 x 16 pixels")
    options = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24, in_channels=3, out_channels=3,
        text_dim=32, freq_dim=32, ffn_dim=96, num_layers=1,
    )  # fmt: skip
    noise_scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    # Buckets differ in cost by far: tokens, not samples, make steps of equal work.
    loader = streamvid.VideoLoader(options.dataset, max_tokens_per_batch=options.max_tokens, num_epochs=None)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=3e-3)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=5, num_training_steps=options.steps)
    # diffusers' scripts derive the number of steps from len(dataloader): it is here too, and the same on every rank.
    num_epochs = math.ceil(options.steps / max(1, len(loader)))
    transformer, optimizer, schedule = accelerator.prepare(transformer, optimizer, schedule)
    seen, losses, shapes = [], [], set()
    with loader:
        for step, batch in enumerate(loader, 1):
            video = batch.to(accelerator.device).normalized(torch.float32)
            latents = encode_video(video)
            text = encode_text(batch.text, 32).to(accelerator.device)
            noise = torch.randn_like(latents)
            u = compute_density_for_timestep_sampling("logit_normal", len(latents), logit_mean=0.0, logit_std=1.0)
            index = (u * noise_scheduler.config.num_train_timesteps).long()
            timesteps = noise_scheduler.timesteps[index].to(latents.device)
            sigmas = noise_scheduler.sigmas[index].to(latents.device)[:, None, None, None, None]
            noisy = (1.0 - sigmas) * latents + sigmas * noise
            guess = transformer(noisy, timestep=timesteps, encoder_hidden_states=text, return_dict=False)[0]
            weighting = compute_loss_weighting_for_sd3("none", sigmas)
            loss = (weighting * (guess.float() - (noise - latents).float()) ** 2).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen.append(batch.sample_keys)
            losses.append(loss.item())
            shapes.add((batch.bucket.id, tuple(latents.shape[1:])))
            if step == options.steps:
                break
    accelerator.wait_for_everyone()
    seen = gather_object(seen)  # of all ranks
    if accelerator.is_main_process:
        accelerator.unwrap_model(transformer).save_pretrained(options.output)
        print(json.dumps({"keys": seen, "losses": losses, "latents": sorted(shapes), "epochs": num_epochs}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
