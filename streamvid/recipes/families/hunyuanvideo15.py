"""HunyuanVideo 1.5, text to video and image to video: flow matching with text states of Qwen2.5-VL and ByT5.

Numbers and their sources (diffusers 0.42.1, pipelines/hunyuan_video1_5/, unless stated):

- 1000 tokens of Qwen2.5-VL after the template and 256 of ByT5 for quoted text, with masks.
- text to video: zeros in place of the image's states, latents and mask (`vision_num_semantic_tokens`,
  `prepare_cond_latents_and_mask` of pipeline_hunyuan_video1_5.py).
- image to video: states of SigLIP, and the latents of the first frame followed by zeros, with a mask channel
  (pipeline_hunyuan_video1_5_image2video.py). Images are trained as text to video, as in the official training
  (`sample_task`, Tencent-Hunyuan/HunyuanVideo-1.5, train.py at 60783e7).
- timestep: 1000 · time. The official training uses logit-normal times with shift 3 (train.py at 995afc6).
- latents: `scaling_factor` of the VAE's config.
"""

from __future__ import annotations

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

DEFAULTS = {"time_shift": 3.0, "guidance": 6.0}
IMAGE_TO_VIDEO = "HunyuanVideo15ImageToVideoPipeline"
NUM_IMAGE_TOKENS = 729


def build(*, task: str = "sft", **settings: Any) -> HunyuanVideo15Training:
    """Build the training module for the HunyuanVideo 1.5 model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return HunyuanVideo15Training(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class HunyuanVideo15Training(DiffusionTraining):
    """Training module for HunyuanVideo 1.5."""

    PIPELINES = ("HunyuanVideo15Pipeline", IMAGE_TO_VIDEO)
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("HunyuanVideo15Transformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {
        "vae": ("AutoencoderKLHunyuanVideo15",),
        "text_encoder": ("Qwen2_5_VLTextModel",),
        "text_encoder_2": ("T5EncoderModel",),
        "image_encoder": ("SiglipVisionModel",),
    }
    TOKENIZERS = ("tokenizer", "tokenizer_2", "feature_extractor")
    TEXT_OUTPUTS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
    MAX_TEXT = None

    def uses_image(self) -> bool:
        """Return True for an image-to-video model."""
        return self.folder.pipeline == IMAGE_TO_VIDEO

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        vae = self.vae
        return vae.temporal_compression_ratio, vae.spatial_compression_ratio * self.transformer.config.patch_size

    def prompt_settings(self, text: str, image: Tensor | None) -> dict[str, Any]:
        """Return no additional arguments."""
        return {}

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """For image-to-video, return the first frame: its pixels, latents (B, C, 1, h, w) and SigLIP states."""
        if not self.uses_image():
            return {}
        first = self.first_frames(batch, video)
        pixels, pipe = as_pixels(first), self.pipeline()
        rows = [pipe.encode_image(as_image(one), 1, video.device, self.image_encoder.dtype) for one in pixels]
        latents = encode_clips(self.vae, first, "mean", batch.sample_seeds)
        return {"first_frame": pixels, "condition": latents, "image_embeds": torch.cat(rows)}

    def is_unused(self, name: str) -> bool:
        """Return True for parameters of the last block that update only the text states, which no later layer uses."""
        last = f"transformer.transformer_blocks.{self.transformer.config.num_layers - 1}."
        return name.startswith((f"{last}attn.to_add_out.", f"{last}ff_context."))

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the predicted velocity."""
        model = self.transformer
        if model.config.use_meanflow:
            raise ConfigError(
                f"{self.folder.root} is a step-distilled model; train the model that it was distilled from"
            )
        image, mask = torch.zeros_like(noisy), torch.zeros_like(noisy[:, :1])
        states = noisy.new_zeros(len(noisy), NUM_IMAGE_TOKENS, model.config.image_embed_dim)
        if self.uses_image() and noisy.shape[2] > 1:
            image[:, :, :1], mask[:, :, 0], states = batch.condition.to(noisy), 1, batch.image_embeds
        found: Tensor = model(
            hidden_states=torch.cat([noisy, image, mask], dim=1).to(model.dtype),
            timestep=drawn.times * self.NUM_STEPS,
            encoder_hidden_states=batch.prompt_embeds.to(model.dtype),
            encoder_attention_mask=batch.prompt_embeds_mask,
            encoder_hidden_states_2=batch.prompt_embeds_2.to(model.dtype),
            encoder_attention_mask_2=batch.prompt_embeds_mask_2,
            image_embeds=states.to(model.dtype),
            return_dict=False,
        )[0]
        return found

    def pipeline(self, name: str | None = None) -> Any:
        """Build the pipeline, modified to keep an image's size instead of choosing a standard size."""
        pipe = super().pipeline(name)
        if self.uses_image():
            pipe.video_processor.calculate_default_height_width = lambda height, width, target_size: (height, width)
        return pipe

    def pipeline_settings(self) -> dict[str, Any]:
        """Return the pipeline's guider, set to the guidance scale for sampling."""
        from diffusers import ClassifierFreeGuidance

        return {"guider": ClassifierFreeGuidance(guidance_scale=self.config.guidance)}

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the image, if the model needs one. The guidance scale is set in the guider instead."""
        return {"image": as_image(batch.first_frame[row])} if self.uses_image() else {}
