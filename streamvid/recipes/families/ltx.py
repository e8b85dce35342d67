"""LTX-Video: flow matching on latents of a VAE that divides sides by 32, with T5 text states and per-token timesteps.

Numbers and their sources:

- 128 text tokens, with a mask (`max_sequence_length` of diffusers 0.42.1, pipelines/ltx/pipeline_ltx.py).
- positions: seconds and pixels, from the frame rate of each clip (`rope_interpolation_scale`, same file); an image has
  one position in time, so its rate does not matter.
- time shift: by the number of tokens, from the scheduler's config (`calculate_shift`, same file).
- a first frame given to the model has timestep 0 (pipeline_ltx_image2video.py) and is excluded from the loss
  (Lightricks/LTX-2, packages/ltx-trainer/src/ltx_trainer/training_strategies/flexible.py at 4e277dd); probability 0.1
  (finetrainers, finetrainers/models/ltx_video/base_specification.py at 1b23667).
- latents: `latents_mean`, `latents_std` (buffers) and `scaling_factor` of the VAE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from streamvid.config import options_of
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.diffusion.training import CLASSES, DiffusionTraining, as_image, as_pixels

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"max_text_tokens": 128, "first_frame": 0.1, "guidance": 3.0}
DEFAULT_RATE = 25.0


def build(*, task: str = "sft", **settings: Any) -> LtxTraining:
    """Build the training module for the LTX-Video model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return LtxTraining(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


def pack(latents: Tensor) -> Tensor:
    """Rearrange latents (B, C, t, h, w) into tokens (B, t·h·w, C)."""
    return latents.flatten(2).transpose(1, 2)


def per_token_times(drawn: NoiseDraw, latents: Tensor) -> Tensor:
    """Return the time (B, t·h·w) of each token in latents (B, C, t, h, w). Tokens of given first frames have time 0."""
    per_frame = drawn.times[:, None].expand(-1, latents.shape[2]).clone()
    per_frame[drawn.given, 0] = 0
    return per_frame.repeat_interleave(latents.shape[3] * latents.shape[4], dim=1)


class LtxTraining(DiffusionTraining):
    """Training module for LTX-Video."""

    PIPELINES: ClassVar[tuple[str, ...]] = ("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline")
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("LTXVideoTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {"vae": ("AutoencoderKLLTXVideo",), "text_encoder": ("T5EncoderModel",)}
    TEXT_PIPELINE = "LTXPipeline"
    TEXT_OUTPUTS: ClassVar[tuple[str | None, ...]] = ("prompt_embeds", "prompt_attention_mask")

    def takes_first_frame(self) -> bool:
        """Return True, because every token has its own timestep."""
        return True

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        return self.vae.temporal_compression_ratio, self.vae.spatial_compression_ratio

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """Return the pixels of the first frame if samples are rendered from this frame; otherwise, return {}."""
        return {"first_frame": as_pixels(self.first_frames(batch, video))} if self.config.first_frame == 1 else {}

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the predicted velocity."""
        model, (t, h, w) = self.transformer, noisy.shape[2:]
        rates = batch.fps.nan_to_num(DEFAULT_RATE).to(noisy).view(-1, 1, 1, 1, 1)
        temporal, spatial = self.compression()
        found: Tensor = model(
            hidden_states=pack(noisy).to(model.dtype),
            encoder_hidden_states=batch.prompt_embeds.to(model.dtype),
            timestep=per_token_times(drawn, noisy) * self.NUM_STEPS,
            encoder_attention_mask=batch.prompt_attention_mask,
            num_frames=t,
            height=h,
            width=w,
            rope_interpolation_scale=(temporal / rates, spatial, spatial),
            return_dict=False,
        )[0]
        return found.transpose(1, 2).reshape(len(noisy), -1, t, h, w)

    def compression(self) -> tuple[int, int]:
        """Return (frames per latent frame, pixels per latent side) for the VAE.

        If no VAE is loaded, return the values for LTX-Video's VAE.
        """
        return self.size_factors() if hasattr(self, "vae") else (8, 32)

    def pipeline_name(self) -> str:
        """Return the name of the pipeline that renders samples."""
        return "LTXImageToVideoPipeline" if self.config.first_frame == 1 else "LTXPipeline"

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the guidance scale, the frame rate and, for image-to-video, the image."""
        rate = float(batch.fps.nan_to_num(DEFAULT_RATE)[row])
        image = {"image": as_image(batch.first_frame[row])} if self.config.first_frame == 1 else {}
        return {"guidance_scale": self.config.guidance, "frame_rate": rate, **image}
