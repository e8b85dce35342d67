#!/usr/bin/env python3
"""Training loop written for Open-Sora's prepare_dataloader. Only this function, below, was changed for streamvid.

    python opensora_loop.py DATASET --epochs 2 --checkpoint opensora.pt

Batches have Open-Sora's keys. The loop works as in Open-Sora: it prefetches one batch, passes the epoch to the sampler,
and saves the sampler's state for a given step. In addition, all ranks have the same bucket in each step, and a run can
resume with a different number of ranks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import streamvid

IMAGE_FPS = 120.0  # Open-Sora's way of telling the model that there is no motion


class OpenSoraLoader:
    """Stands in for both results of prepare_dataloader: the dataloader, and the sampler whose position is saved."""

    def __init__(self, loader: streamvid.VideoLoader) -> None:
        self.loader = loader
        self.set_epoch, self.load_state_dict = loader.set_epoch, loader.load_state_dict
        self._states: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def step(self) -> int:
        return len(self.loader) - self.loader.num_steps_left

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            # The loop keeps one batch ahead, which the loader counts as handed out: note the place at each step.
            self._states = {self.step - 1: self._states.get(self.step - 1, {}), self.step: self.loader.state_dict()}
            yield as_opensora(batch)

    def state_dict(self, step: int) -> dict[str, Any]:
        return self._states[step]


def as_opensora(batch: streamvid.Batch) -> dict[str, Any]:
    frames, height, width = batch.bucket.shape
    shape = {"num_frames": frames, "height": height, "width": width, "ar": height / width}
    facts = {name: torch.full((len(batch.text),), float(value)) for name, value in shape.items()}
    names = {"text": batch.text, "path": batch.source, "key": batch.sample_keys}
    return {"video": batch.normalized(torch.float32), "fps": batch.fps.nan_to_num(IMAGE_FPS), **names, **facts}


def prepare_dataloader(dataset: Path, batch_size: int, seed: int = 1024) -> tuple[OpenSoraLoader, OpenSoraLoader]:
    # bucket_config became the dataset's buckets when it was sharded; batch_size may be {bucket: n}, as it was there.
    loader = OpenSoraLoader(streamvid.VideoLoader(dataset, batch_size=batch_size, seed=seed, columns=("source",)))
    return loader, loader


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.facts, self.inner, self.outer = nn.Linear(5, 16), nn.Conv3d(3, 16, 1), nn.Conv3d(16, 3, 1)

    def forward(self, x: Tensor, num_frames: Tensor, height: Tensor, width: Tensor, ar: Tensor, fps: Tensor) -> Tensor:
        facts = self.facts(torch.stack([num_frames, height, width, ar, fps], dim=1).log())
        guess: Tensor = self.outer(nn.functional.silu(self.inner(x) + facts[:, :, None, None, None]))
        return guess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=Path("opensora.pt"))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--stop", type=int, help="step of the epoch after which to save and stop")
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataloader, sampler = prepare_dataloader(options.dataset, options.batch_size)
    model = Denoiser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
    keys, paths, losses, facts = [], [], [], {}
    for epoch in range(dataloader.loader.epoch, options.epochs):
        sampler.set_epoch(epoch)
        start, batches = sampler.step, iter(dataloader)
        ahead = next(batches, {})  # nothing where the state was saved at an epoch's end
        for step in range(start + 1, len(dataloader) + 1):
            batch, ahead = ahead, next(batches) if step < len(dataloader) else {}
            x, _text = batch.pop("video").to(device, non_blocking=True), batch.pop("text")
            keys.append((epoch, batch.pop("key")))
            paths.append(batch.pop("path"))
            facts = {name: value.to(device) for name, value in batch.items()}
            x = nn.functional.adaptive_avg_pool3d(x, (min(x.shape[2], 4), 16, 16))  # a VAE's and text encoder's place
            noise = torch.randn_like(x)
            loss = nn.functional.mse_loss(model(0.5 * x + 0.5 * noise, **facts), noise - x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step in (options.stop, len(dataloader)):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"sampler": sampler.state_dict(step)}, options.checkpoint)
            if step == options.stop:
                raise SystemExit(f"stopped after step {step} because of --stop")
    dataloader.loader.close()
    last = {name: values.tolist() for name, values in facts.items()}
    print(json.dumps({"keys": keys, "paths": paths, "losses": losses, "facts": last}))


if __name__ == "__main__":
    main()
