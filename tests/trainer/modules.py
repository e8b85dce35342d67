"""A training module like a user's: an encoder, a denoiser with dropout, and noise and times per sample."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def draw(shape: Sequence[int], seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw noise and a time for each sample from its own seed."""
    noise, times = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        times.append(torch.rand((), generator=generator))
        noise.append(torch.randn(tuple(shape[1:]), generator=generator))
    return torch.stack(noise), torch.stack(times)


class Denoiser(nn.Module):
    def __init__(self, channels: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(channels, dim)
        self.time = nn.Linear(1, dim)
        self.text = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(dim, channels)

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(latents.movedim(1, -1))
        pooled = (self.text(text) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        hidden = hidden + (self.time(times[:, None]) + pooled)[:, None, None, None]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden).movedim(-1, 1)


class UserTraining(nn.Module):
    encoders = ("vae",)

    def __init__(
        self,
        dim: int = 16,
        dropout: float = 0.0,
        encoder: bool = True,
        unused: bool = False,
        states_unused: bool = False,
    ) -> None:
        super().__init__()
        self.has_unused_parameters = states_unused
        self.dit = Denoiser(12, dim, dropout)
        with torch.random.fork_rng():
            torch.manual_seed(11)  # like released weights, independent of what else is built
            self.vae = nn.Conv3d(3, 12, (1, 4, 4), stride=(1, 4, 4)).requires_grad_(False) if encoder else None
        self.spare = nn.Linear(dim, dim) if unused else None
        self.seen: list[str] = []

    def encode(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        video = batch["video"].float() / 127.5 - 1
        assert self.vae is not None
        words = [
            torch.tensor([[len(w), ord(w[0]) % 7, 1.0, 0.5] for w in text.split()] or [[0.0] * 4])
            for text in batch["text"]
        ]
        return {"latents": self.vae(video), "words": words}

    def encode_null(self) -> dict[str, Tensor]:
        return {"words": torch.zeros(1, 4)}

    def forward(self, batch: Any) -> dict[str, Tensor]:
        self.seen += batch.sample_keys
        latents = batch.latents.float()
        noise, times = draw(latents.shape, batch.sample_seeds)
        t = times[:, None, None, None, None]
        velocity = self.dit((1 - t) * latents + t * noise, times, batch.words, batch.words_mask.float())
        losses = (velocity - (noise - latents)).square().mean(dim=(1, 2, 3, 4))
        return {"loss": losses, "late": losses[times > 0.5].sum() / len(losses)}

    def sample(self, batch: Any) -> Tensor:
        return torch.full((len(batch.sample_keys), 3, *batch.bucket.shape), 128, dtype=torch.uint8)


def build(task: str = "sft", **arguments: Any) -> UserTraining:
    return UserTraining(encoder=task != "sft:train", **arguments)


def distil(module: UserTraining, batch: Any) -> dict[str, Tensor]:
    """Return a user-defined loss: the distance from a teacher's velocity, here twice the noise."""
    noise, times = draw(batch.latents.shape, batch.sample_seeds)
    velocity = module.dit(noise, times, batch.words, batch.words_mask.float())
    return {"loss": (velocity - 2 * noise).square().mean(dim=(1, 2, 3, 4))}


class FailingSamples(UserTraining):
    """A module that raises an error instead of rendering samples."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def sample(self, batch: Any) -> Tensor:
        raise self.error


def fails_on_rank_1(**arguments: Any) -> nn.Module:
    """Build the small recipe with samples that fail on rank 1 while rank 0 gathers sharded weights for its samples."""
    from streamvid.recipes.small.training import build

    module: Any = build(**arguments)
    render = module.sample

    def sample(batch: Any) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("out of memory")
        found: Tensor = render(batch)
        return found

    module.sample = sample
    found: nn.Module = module
    return found


class LoggedTraining(UserTraining):
    """A module that records the samples it trains on, in one file per process."""

    def __init__(self, log: str, pause: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log, self.pause = Path(log) / f"seen-{os.getpid()}", pause

    def forward(self, batch: Any) -> dict[str, Tensor]:
        with self.log.open("a") as file:
            file.write("".join(f"{key}\n" for key in batch.sample_keys))
        time.sleep(self.pause)
        return super().forward(batch)


def build_logged(log: str, pause: float = 0.0, task: str = "sft", **arguments: Any) -> LoggedTraining:
    return LoggedTraining(log, pause, encoder=task != "sft:train", **arguments)


class Counting(nn.Module):
    """A module with a buffer that training updates, and with buffers of a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.dit = nn.Sequential(nn.BatchNorm3d(3), nn.Conv3d(3, 3, 1))
        self.vae = nn.BatchNorm3d(3).requires_grad_(False)

    def forward(self, batch: Any) -> Tensor:
        video = batch.normalized(torch.float32)
        return (self.dit(video) - self.vae(video)).square().mean()


def build_counting() -> Counting:
    return Counting()
