"""A training module like that of a DiffSynth-Studio user, which records the batches it receives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PIXELS = 8  # side of the square that one latent covers


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.q(x).relu())


class Dit(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LoggedTraining(nn.Module):
    encoders = ("vae",)

    def __init__(self, log: str, task: str) -> None:
        super().__init__()
        self.log = Path(log)
        if task != "sft:train":
            self.vae = nn.Conv3d(3, 4, (1, PIXELS, PIXELS), stride=(1, PIXELS, PIXELS)).requires_grad_(False)
        if task != "sft:data_process":
            self.dit = Dit(4)

    def encode(self, batch: Any) -> dict[str, Tensor]:
        return {"latents": self.vae(batch.normalized(torch.float32))}

    def forward(self, batch: Any) -> dict[str, Tensor]:
        media = {name: list(tensor.shape) for name, tensor in getattr(batch, "media", {}).items()}
        told = {
            "keys": list(batch.sample_keys),
            "texts": list(batch.text),
            "shape": list(batch.latents.shape),
            "media": media,
            "score": batch.score.tolist() if hasattr(batch, "score") else None,
            "has_encoder": hasattr(self, "vae"),
            "rank": int(os.environ.get("RANK", "0")),
        }
        self.log.mkdir(exist_ok=True)
        with (self.log / f"{told['rank']}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")
        latents = batch.latents.float()
        return {"loss": (self.dit(latents.movedim(1, -1)).movedim(-1, 1) - latents).square().mean(dim=(1, 2, 3, 4))}


def build(log: str, task: str = "sft") -> LoggedTraining:
    return LoggedTraining(log, task)
