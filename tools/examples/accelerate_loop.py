#!/usr/bin/env python3
"""Training with accelerate: gradient accumulation, and checkpoints that contain the loader's position.

    accelerate launch accelerate_loop.py DATASET --output run/ --epochs 1
    accelerate launch accelerate_loop.py DATASET --output run/ --epochs 3     # resumes where the previous run ended

`--save-every 5 --stop-after 7` simulates a run that fails between two checkpoints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

import streamvid


class Model(nn.Module):
    """Predicts the noise in a noisy clip. Convolutions accept any (T, H, W), so one model serves every bucket."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(3, channels, 3, padding=1), nn.SiLU(), nn.Conv3d(channels, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        guess: Tensor = self.net(x)
        return guess


def loss_of(model: nn.Module, video: Tensor) -> Tensor:
    # A small picture is enough for an example; a real script encodes the video with its VAE here.
    x = nn.functional.adaptive_avg_pool3d(video, (min(video.shape[2], 4), 16, 16))
    noise = torch.randn_like(x)
    return nn.functional.mse_loss(model(0.5 * x + 0.5 * noise), noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--output", type=Path, default=Path("run"))
    parser.add_argument("--epochs", type=int, default=1, help="total number of epochs, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--save-every", type=int, default=5, help="optimizer steps between checkpoints")
    parser.add_argument("--stop-after", type=int, help="optimizer steps after which to stop without saving")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # After Accelerator(): the loader asks torch.distributed which rank it is.
    # accumulate: accelerate cannot tell the last batch of a loader that is not its own, so an epoch would end with
    # gradients half summed; with it, the steps of an epoch are a multiple.
    loader = streamvid.VideoLoader(options.dataset, batch_size=options.batch_size, accumulate=options.accumulate)
    # prepare() leaves the loader as it is: it deals samples to ranks itself. It stands here because most scripts
    # have it so; leave it out as you like.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # state_dict and load_state_dict are all that accelerate asks for: from here on save_state and load_state carry
    # the loader's place. Do not use accelerator.skip_first_batches: it would decode what it skips.
    accelerator.register_for_checkpointing(loader)

    checkpoint = options.output / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    seen, losses, num_updates = [], [], 0
    with loader:
        while loader.epoch < options.epochs:
            for batch in loader:
                with accelerator.accumulate(model):
                    video = batch.to(accelerator.device).normalized(torch.float32)
                    loss = loss_of(model, video)
                    # The weight makes the sum over batches of unequal size the mean over their samples.
                    accelerator.backward(loss * batch.loss_weight)
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(batch.sample_keys)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    num_updates += 1
                    # Only here, where no gradient is half summed: a checkpoint does not hold those.
                    if num_updates % options.save_every == 0:
                        accelerator.save_state(str(checkpoint))
                    if num_updates == options.stop_after:
                        raise SystemExit(f"stopped after {num_updates} updates because of --stop-after")
        accelerator.save_state(str(checkpoint))  # the same command again finds nothing left to do
    seen = gather_object(seen)  # of all ranks
    if accelerator.is_main_process:
        print(json.dumps({"updates": num_updates, "epoch": loader.epoch, "keys": seen, "losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
