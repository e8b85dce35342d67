"""Training modules with encoders, for tests of the first stage of split training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from streamvid.config import options_of
from streamvid.recipes.small import SmallConfig, SmallTraining
from tests.trainer.modules import UserTraining


class Encoding(UserTraining):
    """A module that encodes.

    draws: scale of the random part of the latents, as from a posterior. log: folder for one file per process with the
    encoded keys; the file is named after the process and its GPUs. pause: seconds per batch. A sidecar depends on
    `draws` only.
    """

    encoder_args = ("draws",)

    def __init__(self, draws: float = 0.0, log: str = "", pause: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.draws, self.log, self.pause = draws, log, pause

    def encode(self, batch: Any) -> dict[str, Any]:
        if self.log:
            with (Path(self.log) / f"encoded-{os.getpid()}-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}").open(
                "a"
            ) as file:
                file.write("".join(f"{key}\n" for key in batch.sample_keys))
        time.sleep(self.pause)
        found = super().encode(batch)
        if self.draws:
            found["latents"] = found["latents"] + self.draws * torch.randn(found["latents"].shape)
        return found


class Controlled(Encoding):
    """A module that also encodes a control video and adds it to the latents of the model."""

    def encode(self, batch: Any) -> dict[str, Any]:
        assert self.vae is not None
        return super().encode(batch) | {"control": self.vae(batch.media["control"].float() / 127.5 - 1)}

    def forward(self, batch: Any) -> Any:
        return super().forward(batch.with_fields({"latents": batch.latents + batch.control}))


class Hearing(SmallTraining):
    """The small module with audio, which takes `pause` seconds longer to encode a batch."""

    pause = 0.0

    def encode(self, batch: Any) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        time.sleep(self.pause)
        return super().encode(batch)


def build_hearing(task: str = "sft", pause: float = 0.0, **settings: Any) -> Hearing:
    module = Hearing(options_of(SmallConfig, settings, "model.args"), with_encoders=task != "sft:train")
    module.pause = pause
    return module


def build_controlled(task: str = "sft", **arguments: Any) -> Controlled:
    return Controlled(encoder=task != "sft:train", **arguments)


def build(task: str = "sft", **arguments: Any) -> Encoding:
    return Encoding(encoder=task != "sft:train", **arguments)


def build_pretrained(folder: str, task: str = "sft") -> UserTraining:
    """Build a module that loads its encoder itself, like from_pretrained."""
    module = UserTraining(encoder=task != "sft:train")
    if module.vae is not None:
        module.vae.load_state_dict(load_file(Path(folder) / "vae.safetensors"))
    return module


build_renamed = build_pretrained


def build_without_encode(task: str = "sft") -> torch.nn.Module:
    return torch.nn.Linear(2, 2)
