"""HunyuanVideo and HunyuanVideo 1.5, text to video: flow matching with a multimodal text encoder and a second one.

Numbers and where they come from (diffusers 0.42.1, pipelines/hunyuan_video/pipeline_hunyuan_video.py and
pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5.py):

- HunyuanVideo: 256 tokens of Llama after the template, with a mask, and the pooled state of CLIP. Its guidance input is
  1000 · 1, as finetrainers trains it (finetrainers/models/hunyuan_video/base_specification.py at 03230b8).
- HunyuanVideo 1.5: 1000 tokens of Qwen2.5-VL after the template and 256 of ByT5 for quoted text, with masks; zeros in
  place of the image's states, latents and mask (`vision_num_semantic_tokens`, `prepare_cond_latents_and_mask`).
- timestep: 1000 · time; time shift: `shift` of the scheduler's config. The official training of 1.5 uses logit-normal
  times with shift 3 (Tencent-Hunyuan/HunyuanVideo-1.5, train.py at 995afc6).
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
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.diffusion.training import CLASSES, DiffusionTraining

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

FIRST = "HunyuanVideoPipeline"
TRAINING_GUIDANCE = 1.0
NUM_IMAGE_TOKENS = 729


def build(*, task: str = "sft", **settings: Any) -> DiffusionTraining:
    """Build the training module of the HunyuanVideo model in `model`, of either version. Draws no random numbers.

    task: task of the run; "sft:train" builds no encoders.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, and for a folder that is not of this family.
    """
    config = options_of(DiffusionConfig, settings, "model.args")
    folder = open_folder(config.model, config.download)
    is_first = folder.pipeline == FIRST
    defaults = {"max_text_tokens": 256, "guidance": 6.0} if is_first else {"time_shift": 3.0, "guidance": 6.0}
    config = options_of(DiffusionConfig, defaults | settings, "model.args")
    kind = HunyuanVideoTraining if is_first else HunyuanVideo15Training
    return kind(folder, config, with_encoders=task != "sft:train")


class HunyuanVideoTraining(DiffusionTraining):
    """Training module of HunyuanVideo."""

    PIPELINES = (FIRST,)
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("HunyuanVideoTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {
        "vae": ("AutoencoderKLHunyuanVideo",),
        "text_encoder": ("LlamaModel",),
        "text_encoder_2": ("CLIPTextModel",),
    }
    TOKENIZERS = ("tokenizer", "tokenizer_2")
    TEXT_OUTPUTS: ClassVar[tuple[str | None, ...]] = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        vae = self.vae
        return vae.temporal_compression_ratio, vae.spatial_compression_ratio * self.transformer.config.patch_size

    def prompt_settings(self) -> dict[str, Any]:
        """Return no further arguments."""
        return {}

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the velocity."""
        model = self.transformer
        has_guidance = model.config.guidance_embeds
        found: Tensor = model(
            hidden_states=noisy.to(model.dtype),
            timestep=drawn.times * self.NUM_STEPS,
            encoder_hidden_states=batch.prompt_embeds.to(model.dtype),
            encoder_attention_mask=batch.prompt_attention_mask,
            pooled_projections=batch.pooled_prompt_embeds.to(model.dtype),
            guidance=torch.full_like(drawn.times, 1000 * TRAINING_GUIDANCE) if has_guidance else None,
            return_dict=False,
        )[0]
        return found


class HunyuanVideo15Training(HunyuanVideoTraining):
    """Training module of HunyuanVideo 1.5."""

    PIPELINES = ("HunyuanVideo15Pipeline",)
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("HunyuanVideo15Transformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {
        "vae": ("AutoencoderKLHunyuanVideo15",),
        "text_encoder": ("Qwen2_5_VLTextModel",),
        "text_encoder_2": ("T5EncoderModel",),
    }
    TEXT_OUTPUTS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
    MAX_TEXT = None

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the velocity."""
        model = self.transformer
        if model.config.use_meanflow:
            raise ConfigError(f"{self.folder.root} is a step-distilled model; train the model that it was made from")
        no_image = torch.zeros_like(noisy[:, :1]).expand(-1, noisy.shape[1] + 1, -1, -1, -1)
        found: Tensor = model(
            hidden_states=torch.cat([noisy, no_image], dim=1).to(model.dtype),
            timestep=drawn.times * self.NUM_STEPS,
            encoder_hidden_states=batch.prompt_embeds.to(model.dtype),
            encoder_attention_mask=batch.prompt_embeds_mask,
            encoder_hidden_states_2=batch.prompt_embeds_2.to(model.dtype),
            encoder_attention_mask_2=batch.prompt_embeds_mask_2,
            image_embeds=noisy.new_zeros(len(noisy), NUM_IMAGE_TOKENS, model.config.image_embed_dim).to(model.dtype),
            return_dict=False,
        )[0]
        return found

    def pipeline_settings(self) -> dict[str, Any]:
        """Return the pipeline's guider, with the guidance scale of samples."""
        from diffusers import ClassifierFreeGuidance

        return {"guider": ClassifierFreeGuidance(guidance_scale=self.config.guidance)}

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return no further arguments: the guider has the guidance scale."""
        return {}
