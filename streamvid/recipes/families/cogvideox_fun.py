"""CogVideoX-Fun Control: CogVideoX whose input also contains the latents of a control video.

The control video is the conditioning input `control`.

Numbers and their sources: the latents of the control video are computed like those of the clip, without noise
(`prepare_control_latents` of diffusers 0.42.1, pipelines/cogvideo/pipeline_cogvideox_fun_control.py); the loss is the
unweighted error of the velocity (scripts/cogvideox_fun/train_control.py of aigc-apps/VideoX-Fun at 199a43b);
everything else is as in CogVideoX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamvid.config import options_of
from streamvid.errors import ConfigError
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.inputs import video_input
from streamvid.recipes.diffusion.latents import encode_clips
from streamvid.recipes.diffusion.training import blank_images
from streamvid.recipes.families.cogvideox import DEFAULTS, CogVideoXTraining

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch


def build(*, task: str = "sft", **settings: Any) -> CogVideoXFunTraining:
    """Build the training module for the CogVideoX-Fun Control model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return CogVideoXFunTraining(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class CogVideoXFunTraining(CogVideoXTraining):
    """Training module for CogVideoX-Fun Control."""

    PIPELINES = ("CogVideoXFunControlPipeline",)

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """Return `control`: the latents (B, C, t, h, w) of the control video."""
        found = video_input(batch, "control", video)
        if found is None:
            raise ConfigError(
                "the batch has no `control` conditioning input, which this model needs; shard with --media "
                "control=COLUMN, and set data.extra_inputs to [control]"
            )
        return {"control": encode_clips(self.vae, found, "mean", batch.sample_seeds)}

    def model_input(self, noisy: Tensor, drawn: Any, batch: Batch) -> Tensor:
        """Return the noisy latents and the latents of the control video."""
        return torch.cat([noisy, self.padded(batch.control).to(noisy)], dim=1)

    def prepare(self, pipe: Any, batch: Batch, row: int) -> None:
        """Pass the encoded control video to the pipeline."""
        control = batch.control[row : row + 1]
        pipe.prepare_control_latents = lambda *_: (None, control.to(self.vae.dtype))

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the guidance scale, and placeholders for the control video, whose latents are already known."""
        return {**super().sample_arguments(batch, row), "control_video": blank_images(batch, batch.bucket.num_frames)}
