"""Mochi 1: flow matching on latents of a VAE that merges 6 frames, with T5 text states.

Numbers and their sources:

- 256 text tokens, with a mask; an empty text is all padding if model_index.json sets `force_zeros_for_empty_prompt`
  (diffusers 0.42.1, pipelines/mochi/pipeline_mochi.py).
- the model counts time from the noise: its timestep is 1000 · (1 - time), and it predicts the opposite velocity
  (finetrainers, finetrainers/models/mochi/lora.py at 452546c).
- latents: `latents_mean`, `latents_std` and `scaling_factor` of the VAE's config.
- 6·k + 1 frames, and sides that are multiples of 16: factors 6 and 8 of the VAE, times patch 2 (pipeline_mochi.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from streamvid.config import options_of
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.diffusion.training import CLASSES, DiffusionTraining

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"max_text_tokens": 256, "guidance": 4.5}


def build(*, task: str = "sft", **settings: Any) -> MochiTraining:
    """Build the training module for the Mochi model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return MochiTraining(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class MochiTraining(DiffusionTraining):
    """Training module for Mochi."""

    PIPELINES = ("MochiPipeline",)
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("MochiTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {"vae": ("AutoencoderKLMochi",), "text_encoder": ("T5EncoderModel",)}
    TEXT_OUTPUTS = ("prompt_embeds", "prompt_attention_mask")

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        return 6, 8 * self.transformer.config.patch_size

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the predicted velocity, in the direction from latents to noise."""
        model = self.transformer
        found: Tensor = model(
            hidden_states=noisy.to(model.dtype),
            encoder_hidden_states=batch.prompt_embeds.to(model.dtype),
            timestep=(1 - drawn.times) * self.NUM_STEPS,
            encoder_attention_mask=batch.prompt_attention_mask.bool(),
            return_dict=False,
        )[0]
        return -found

    def pipeline_settings(self) -> dict[str, Any]:
        """Return the settings in model_index.json."""
        return {"force_zeros_for_empty_prompt": self.folder.setting("force_zeros_for_empty_prompt", False)}
