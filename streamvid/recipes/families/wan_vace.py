"""Wan VACE: Wan with a second stack of blocks for a control video, a mask and reference images.

Conditioning inputs of the batch, all optional: `control`, a video; `mask`, white where the model generates and black
where it keeps the control video; `reference`, an image or several. A mask without a control video trains inpainting:
the control video is the clip itself, with black where the model generates.

Numbers and their sources (diffusers 0.42.1, pipelines/wan/pipeline_wan_vace.py, unless stated):

- control latents: the kept part and the generated part of the control video, encoded separately, then the 8 x 8 values
  of the mask per latent (`prepare_video_latents`, `prepare_masks`); without a mask, everything is generated.
- reference images are latent frames in front, with zeros for the generated part and the mask (same file). In training,
  the model denoises them too (`WanVideoUnit_InputVideoEmbedder`, DiffSynth-Studio, diffsynth/pipelines/wan_video.py at
  bd640b4a).
- a mask without a control video: scripts/wan2.1_vace/train.py of aigc-apps/VideoX-Fun at 804a425.
- everything else is as in Wan, with experts for Wan 2.2.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from streamvid.config import options_of
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.inputs import image_inputs, mask_input, video_input
from streamvid.recipes.diffusion.latents import encode_clips
from streamvid.recipes.diffusion.training import CLASSES, blank_images
from streamvid.recipes.families.wan import DEFAULTS, WanTraining

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_log = logging.getLogger(__name__)


def build(*, task: str = "sft", **settings: Any) -> WanVaceTraining:
    """Build the training module for the Wan VACE model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return WanVaceTraining(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class WanVaceTraining(WanTraining):
    """Training module for Wan VACE."""

    PIPELINES = ("WanVACEPipeline",)
    DENOISERS: ClassVar[CLASSES] = dict.fromkeys(("transformer", "transformer_2"), ("WanVACETransformer3DModel",))
    ENCODERS: ClassVar[CLASSES] = {"vae": ("AutoencoderKLWan",), "text_encoder": ("UMT5EncoderModel",)}
    TOKENIZERS = ("tokenizer",)

    _is_warned = False

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """Return `control` (B, 2·C + 64, n + t, h, w), which contains latents and masks.

        n: number of reference images. t: number of latent frames in the control video.
        """
        control, mask = video_input(batch, "control", video), mask_input(batch, "mask", video)
        references = image_inputs(batch, "reference", video)
        if control is None and mask is None and references is None:
            self._warn()
        if control is None:
            control = torch.zeros_like(video) if mask is None else video * (1 - mask)
        if mask is None:
            mask = torch.ones_like(video[:, :1])
        parts = [self._encoded(part, batch) for part in (control * (1 - mask), control * mask)]
        latents = torch.cat([*parts, self._mask_latents(mask, parts[0])], dim=1)
        if references is not None:
            frames = [self._encoded(references[:, :, i : i + 1], batch) for i in range(references.shape[2])]
            kept = torch.cat(frames, dim=2)
            others = kept.new_zeros(len(kept), latents.shape[1] - kept.shape[1], *kept.shape[2:])
            latents = torch.cat([torch.cat([kept, others], dim=1), latents], dim=2)
        return {"control": latents}

    def _encoded(self, video: Tensor, batch: Batch) -> Tensor:
        return encode_clips(self.vae, video, "mean", batch.sample_seeds)

    def _mask_latents(self, mask: Tensor, latents: Tensor) -> Tensor:
        """Rearrange a mask (B, 1, T, H, W) into (B, 64, t, h, w): the pixels of each latent become channels."""
        size, factor = latents.shape[2:], self.vae.config.scale_factor_spatial
        cells = nn.functional.pixel_unshuffle(mask.transpose(1, 2), factor).transpose(1, 2)
        return nn.functional.interpolate(cells, size=tuple(size), mode="nearest-exact")

    def _warn(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            _log.warning(
                "the batch has no `control`, `mask` or `reference` conditioning input, so this model trains as a "
                "text-to-video model; to train with conditions, shard with --media control=COLUMN, and set "
                "data.extra_inputs: [control]"
            )

    def latents_of(self, batch: Batch) -> Tensor:
        """Return the latents to which noise is added: the reference images' latents, followed by the clip's latents."""
        latents = super().latents_of(batch)
        return torch.cat([self._references(batch, latents.shape), latents], dim=2)

    @staticmethod
    def _references(batch: Batch, shape: torch.Size) -> Tensor:
        """Return the latents of a batch's reference images.

        shape: shape of the clips' latents.
        """
        found: Tensor = batch.control[:, : shape[1], : batch.control.shape[2] - shape[2]]
        return found.float()

    def other_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the control latents."""
        return {"control_hidden_states": batch.control}

    def uses_image(self) -> bool:
        """Return False, because images are used only as reference images."""
        return False

    def pipeline_name(self) -> str:
        """Return the name of the pipeline that renders samples."""
        return self.folder.pipeline

    def pipeline_settings(self) -> dict[str, Any]:
        """Return the settings in model_index.json."""
        return {"boundary_ratio": self.folder.setting("boundary_ratio", None)}

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the guidance scale, and placeholders for the reference images, whose latents are already known."""
        latents = (batch.bucket.num_frames - 1) // self.vae.config.scale_factor_temporal + 1
        count = batch.control.shape[2] - latents
        images = {"reference_images": blank_images(batch, count)} if count else {}
        return {"guidance_scale": self.config.guidance, **images}

    def prepare(self, pipe: Any, batch: Batch, row: int) -> None:
        """Pass the encoded conditions to the pipeline."""
        control, num_channels = batch.control[row : row + 1], 2 * self.vae.config.z_dim
        pipe.prepare_video_latents = lambda *_: control[:, :num_channels]
        pipe.prepare_masks = lambda *_: control[:, num_channels:]
