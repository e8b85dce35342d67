#!/usr/bin/env python3
"""Distributed data parallel training with torchrun. Kill it at any point, and restart it with any number of ranks.

    torchrun --nproc_per_node 2 torchrun_ddp.py DATASET --output run/ --epochs 4
    torchrun --nproc_per_node 3 torchrun_ddp.py DATASET --output run/ --epochs 4      # resumes at the last checkpoint

Each rank records the samples that it trained on in run/samples-*.jsonl. The last line of output lists those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import streamvid


class Model(nn.Module):
    """Predicts the noise in a noisy clip. Convolutions accept any (T, H, W), so one model serves every bucket."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(3, channels, 3, padding=1), nn.SiLU(), nn.Conv3d(channels, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        guess: Tensor = self.net(x)
        return guess


def losses_of(model: nn.Module, video: Tensor) -> Tensor:
    # A small picture is enough for an example; a real script encodes the video with its VAE here.
    x = nn.functional.adaptive_avg_pool3d(video, (min(video.shape[2], 4), 16, 16))
    noise = torch.randn_like(x)
    return (model(0.5 * x + 0.5 * noise) - noise).square().mean(dim=(1, 2, 3, 4))


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, place: dict[str, Any]) -> None:
    state = place | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # Written whole, then renamed: a kill in between leaves the last checkpoint as it was.
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--output", type=Path, default=Path("run"))
    parser.add_argument("--epochs", type=int, default=2, help="total number of epochs, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=1, help="samples per rank per step")
    parser.add_argument("--save-every", type=int, default=3)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # No sampler and no DistributedSampler: rank and world size come from torch.distributed. "pad" fills a bucket's last
    # step with repeats, so that each epoch holds every sample; the default, "carry", opens the next epoch with them.
    loader = streamvid.VideoLoader(options.dataset, batch_size=options.batch_size, tail="pad")
    step, seen, losses = 0, [], []
    checkpoint = options.output / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        # One state for all ranks, whatever their number was when it was saved.
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    torch.manual_seed(1_000_003 * step + rank)  # other noise on each rank
    journal = options.output / f"samples-from{step}-rank{rank}.jsonl"
    with loader, journal.open("w") as file:
        while loader.epoch < options.epochs:
            for batch in loader:
                video = batch.to(device).normalized(torch.float32)
                # A repeat must not count twice. Each rank has the same number of slots, so DDP's mean over the ranks
                # is off by one constant factor in a padded step only, and never waits for a rank without a batch.
                loss = (losses_of(model, video) * ~batch.is_repeat.to(device)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                repeats = batch.is_repeat.tolist()
                seen.append([key for key, again in zip(batch.sample_keys, repeats, strict=True) if not again])
                losses.append(loss.item())
                note = {"step": step, "epoch": loader.epoch, "keys": batch.sample_keys, "pid": os.getpid()}
                print(json.dumps(note | {"is_repeat": repeats}), file=file, flush=True)
                if rank == 0 and step % options.save_every == 0:
                    # All ranks have the same state after the same step, so one rank saves it for all.
                    save(checkpoint, model.module, optimizer, {"loader": loader.state_dict(), "step": step})
        if rank == 0:  # the steps since the last save too: the same command again finds nothing left to do
            save(checkpoint, model.module, optimizer, {"loader": loader.state_dict(), "step": step})
    if rank == 0:
        done = {"step": step, "epoch": loader.epoch, "ranks": dist.get_world_size()}
        print(json.dumps(done | {"losses": losses, "keys": seen}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
