"""Custom task for `streamvid train`: a small student learns the velocity of a larger teacher instead of the data's.

    PYTHONPATH=tools/examples streamvid train --config tiny --set data.dataset=DATASET --set output=run/ \\
        --set model.factory=distillation:build --set task=distillation:distil \\
        --set 'model.args={teacher: teacher.safetensors}' --set 'model.trainable=[student]'

A task is a function (module, batch) → loss. The module's children are the models, and `model.trainable` names the
models to train. teacher.safetensors is the file run/step-N.safetensors from `streamvid train --config tiny`.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from streamvid.loader.batch.batch import Batch
from streamvid.recipes.small import SmallTraining
from streamvid.recipes.small import build as build_small
from streamvid.recipes.small.flow import draw_noise_and_times

TEACHER: dict[str, Any] = {
    "dim": 128,
    "depth": 2,
    "heads": 4,
    "patch": [4, 16, 16],
}  # as configs/train/tiny.yaml has it


class Distillation(nn.Module):
    """Training module with a `student` that is trained, and `small` with the frozen teacher and its encoders."""

    encoders = ("small",)

    def __init__(self, small: SmallTraining, student: nn.Module) -> None:
        super().__init__()
        self.small, self.student = small, student

    def encode(self, batch: Batch) -> dict[str, Any]:
        """Return the latents and text states from the small module."""
        return self.small.encode(batch)


def build(teacher: str, dim: int = 48, depth: int = 1) -> Distillation:
    """Build a teacher from a file, and a smaller student."""
    small = build_small(**TEACHER)
    small.load_state_dict(load_file(teacher), strict=False)
    return Distillation(small, build_small(task="sft:train", **{**TEACHER, "dim": dim, "depth": depth}).transformer)


def distil(module: Distillation, batch: Batch) -> dict[str, Tensor]:
    """Return each sample's mean squared difference between the student's and the teacher's velocity."""
    latents = batch.latents
    noise, times = draw_noise_and_times(latents.shape[1:], batch.sample_seeds, latents.device)
    t = times[:, None, None, None, None]
    given = ((1 - t) * latents + t * noise, times, batch.text_states, batch.text_states_mask)
    with torch.no_grad():
        wanted = module.small.transformer(*given)
    return {"loss": (module.student(*given).float() - wanted.float()).square().flatten(1).mean(dim=1)}
