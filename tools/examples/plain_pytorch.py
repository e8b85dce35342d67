#!/usr/bin/env python3
"""A plain PyTorch loop whose checkpoint contains the loader's state, so that a resume is exact.

    python plain_pytorch.py DATASET --checkpoint run.pt --steps 20
    python plain_pytorch.py DATASET --checkpoint run.pt --steps 40      # resumes after step 20

The second run gets the same batches, windows and losses as steps 21 to 40 of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
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
    parser.add_argument("--checkpoint", type=Path, default=Path("run.pt"))
    parser.add_argument("--steps", type=int, default=20, help="total number of steps, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Endless: the end of an epoch costs no pause, and the loop below needs no second loop around it.
    loader = streamvid.VideoLoader(options.dataset, batch_size=options.batch_size, num_epochs=None)
    step, seen, losses = 0, [], []

    if options.checkpoint.exists():
        # The loader's state is plain JSON, so torch.load's safe default reads it.
        saved: dict[str, Any] = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        # The noise is drawn from torch's generator; without this line a resume would see other noise.
        torch.set_rng_state(saved["rng"])
        step = saved["step"]

    with loader:  # ends the decode processes, also where the loop raises
        for batch in loader if step < options.steps else ():
            # uint8 goes to the device and becomes float there: a quarter of the bytes of float32.
            video = batch.to(device).normalized(torch.float32)
            loss = loss_of(model, video)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            seen.append(batch.sample_keys)
            losses.append(loss.item())
            if step == options.steps:
                break
        # The state counts the batches that this loop has got, not those decoded ahead: save it beside the weights
        # that have seen the same batches.
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step,
            },
            options.checkpoint,
        )
    print(json.dumps({"step": step, "epoch": loader.epoch, "keys": seen, "losses": losses}))


if __name__ == "__main__":
    main()
