"""HunyuanVideo, text to video and image to video: flow matching with two text encoders, one of them multimodal.

Numbers and their sources (diffusers 0.42.1, pipelines/hunyuan_video/, unless stated):

- 256 tokens of Llama after the template, with a mask, and the pooled state of CLIP (pipeline_hunyuan_video.py). The
  guidance input is 1000 · 1, as in finetrainers (finetrainers/models/hunyuan_video/base_specification.py at 03230b8).
- image to video (pipeline_hunyuan_video_image2video.py): Llava encodes the first frame, and its states precede those
  of the text: every second one or, if the transformer's `image_condition_type` is `token_replace`, every fourth. An
  empty text is encoded with a black image, as is the pipeline's negative prompt.
- `latent_concat`: latents of the first frame, followed by zeros, and a mask channel are added to the input. The
  pipeline returns four frames fewer than requested, so four more are requested.
- `token_replace`: latents of the first frame replace the first noisy ones, and are excluded from the loss; the
  guidance input is 1000 · 6 (`training_losses`, hyvideo/diffusion/flow/transport.py, and
  scripts/run_train_image2video_lora.sh of Tencent-Hunyuan/HunyuanVideo-I2V at 1481c1d).
- timestep: 1000 · time; time shift: `shift` of the scheduler's config; latents: `scaling_factor` of the VAE's config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from streamvid.config import options_of
from streamvid.errors import ConfigError
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.latents import encode_clips
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.diffusion.training import CLASSES, DiffusionTraining, as_image, as_pixels

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"max_text_tokens": 256, "guidance": 6.0}
IMAGE_TO_VIDEO = "HunyuanVideoImageToVideoPipeline"
TRAINING_GUIDANCE, IMAGE_TRAINING_GUIDANCE = 1.0, 6.0
LOST_FRAMES = 4


def build(*, task: str = "sft", **settings: Any) -> HunyuanVideoTraining:
    """Build the training module for the HunyuanVideo model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    folder = open_folder(config.model, config.download)
    kind = HunyuanVideoImageTraining if folder.pipeline == IMAGE_TO_VIDEO else HunyuanVideoTraining
    return kind(folder, config, with_encoders=task != "sft:train")


class HunyuanVideoTraining(DiffusionTraining):
    """Training module for text-to-video HunyuanVideo models."""

    PIPELINES: ClassVar[tuple[str, ...]] = ("HunyuanVideoPipeline",)
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("HunyuanVideoTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {
        "vae": ("AutoencoderKLHunyuanVideo",),
        "text_encoder": ("LlamaModel",),
        "text_encoder_2": ("CLIPTextModel",),
    }
    TOKENIZERS: ClassVar[tuple[str, ...]] = ("tokenizer", "tokenizer_2")
    TEXT_OUTPUTS: ClassVar[tuple[str | None, ...]] = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
    GUIDANCE = TRAINING_GUIDANCE

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        vae = self.vae
        return vae.temporal_compression_ratio, vae.spatial_compression_ratio * self.transformer.config.patch_size

    def prompt_settings(self, text: str, image: Tensor | None) -> dict[str, Any]:
        """Return no additional arguments."""
        return {}

    def model_input(self, noisy: Tensor, batch: Batch) -> Tensor:
        """Return the transformer's input for noisy latents."""
        return noisy

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the predicted velocity."""
        model = self.transformer
        has_guidance = model.config.guidance_embeds
        found: Tensor = model(
            hidden_states=self.model_input(noisy, batch).to(model.dtype),
            timestep=drawn.times * self.NUM_STEPS,
            encoder_hidden_states=batch.prompt_embeds.to(model.dtype),
            encoder_attention_mask=batch.prompt_attention_mask,
            pooled_projections=batch.pooled_prompt_embeds.to(model.dtype),
            guidance=torch.full_like(drawn.times, 1000 * self.GUIDANCE) if has_guidance else None,
            return_dict=False,
        )[0]
        return found


class HunyuanVideoImageTraining(HunyuanVideoTraining):
    """Training module for image-to-video HunyuanVideo models."""

    PIPELINES = (IMAGE_TO_VIDEO,)
    ENCODERS: ClassVar[CLASSES] = {
        **HunyuanVideoTraining.ENCODERS,
        "text_encoder": ("LlavaForConditionalGeneration",),
    }
    TOKENIZERS = ("tokenizer", "tokenizer_2", "image_processor")
    GUIDANCE = IMAGE_TRAINING_GUIDANCE

    def replaces(self) -> bool:
        """Return True if the latents of the first frame replace noisy latents."""
        return bool(self.transformer.config.image_condition_type == "token_replace")

    def prompt_settings(self, text: str, image: Tensor | None) -> dict[str, Any]:
        """Return the image to encode together with the text, and the interval at which image states are selected."""
        pixels = torch.zeros(3, 64, 64, dtype=torch.uint8) if image is None or not text else image
        return {"image": as_image(pixels), "image_embed_interleave": 4 if self.replaces() else 2}

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """Return the pixels of the first frame, and its latents (B, C, 1, h, w)."""
        first = self.first_frames(batch, video)
        return {"first_frame": as_pixels(first), "condition": encode_clips(self.vae, first, "mean", batch.sample_seeds)}

    def check_size(self, size: tuple[int, int, int], bucket: str) -> None:
        """Raise ConfigError for an unsupported size and, if the first frame is an input to the model, for images.

        An image has only one frame, so the model would have nothing to predict.
        """
        if self.replaces() and size[0] == 1:
            raise ConfigError(
                f"bucket {bucket} contains images, but this model is given the first frame and predicts the remaining "
                "frames; "
                'to select only videos, set data.loader: {where: "num_frames > 1"}'
            )
        super().check_size(size, bucket)

    def draw(self, batch: Batch) -> NoiseDraw:
        """Draw noise and times. With `token_replace`, the first frame of every sample is an input to the model."""
        drawn = super().draw(batch)
        return replace(drawn, given=torch.full_like(drawn.given, self.replaces()))

    def given_frames(self, latents: Tensor, batch: Batch) -> Tensor:
        """Return the latents of the given images, which may differ from the latents of the videos' first frames."""
        found: Tensor = batch.condition
        return found.to(latents)

    def model_input(self, noisy: Tensor, batch: Batch) -> Tensor:
        """Return noisy latents and, with `latent_concat`, the latents of the first frame and a mask."""
        if self.replaces():
            return noisy
        image, mask = torch.zeros_like(noisy), torch.zeros_like(noisy[:, :1])
        image[:, :, :1], mask[:, :, 0] = batch.condition.to(noisy), 1
        return torch.cat([noisy, image, mask], dim=1)

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the guidance scale, the image, and the number of frames to request."""
        lost = 0 if self.replaces() else LOST_FRAMES
        image = as_image(batch.first_frame[row])
        return {**super().sample_arguments(batch, row), "image": image, "num_frames": batch.bucket.num_frames + lost}
