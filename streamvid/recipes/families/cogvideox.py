"""CogVideoX and 1.5: v-prediction on latents of a causal VAE, with T5 text states.

Numbers and their sources (diffusers 0.42.1, pipelines/cogvideo/, unless stated):

- 226 text tokens without a mask; CogVideoX 1.5: 224 (`max_text_seq_length` of the transformer's config).
- uniform integer timesteps and `alphas_cumprod` of the scheduler. The official loss compares denoised latents with
  weight 1 / (1 - alphas_cumprod), which equals the error of the velocity without a weight (`compute_loss` of
  THUDM/CogVideo, finetune/models/cogvideox_i2v/lora_trainer.py at 1789f07).
- rotary positions: `_prepare_rotary_positional_embeddings` of the pipeline. 1.5 pairs latent frames (`patch_size_t`),
  and an odd number of them is preceded by a copy of the first (same pipeline).
- image to video: latents of the first frame with noise of scale exp(normal(-3, 0.5)), followed by zeros, and `ofs` 2
  (same pipeline). They are zeros for 5 % of the samples (diffusers,
  examples/cogvideo/train_cogvideox_image_to_video_lora.py at 23cf712).
- 8·k + 1 frames: the VAE encodes 8 at a time, and otherwise returns a different number of frames than it was given
  (`num_sample_frames_batch_size`, models/autoencoders/autoencoder_kl_cogvideox.py).
- latents: `scaling_factor` of the VAE's config; those of the image are divided by it with `invert_scale_latents`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from streamvid.config import options_of
from streamvid.recipes.diffusion import losses
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.latents import encode_clips
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.diffusion.training import CLASSES, DiffusionTraining, as_image, as_pixels

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"time_sampling": "uniform", "guidance": 6.0}
IMAGE_TO_VIDEO = "CogVideoXImageToVideoPipeline"
KEPT_IMAGES = 0.95
FRAMES_AT_ONCE = 8


def build(*, task: str = "sft", **settings: Any) -> CogVideoXTraining:
    """Build the training module for the CogVideoX model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return CogVideoXTraining(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class CogVideoXTraining(DiffusionTraining):
    """Training module for CogVideoX."""

    PIPELINES: ClassVar[tuple[str, ...]] = ("CogVideoXPipeline", IMAGE_TO_VIDEO)
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("CogVideoXTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {"vae": ("AutoencoderKLCogVideoX",), "text_encoder": ("T5EncoderModel",)}
    TEXT_OUTPUTS = ("prompt_embeds",)

    def uses_image(self) -> bool:
        """Return True for an image-to-video model."""
        return self.folder.pipeline == IMAGE_TO_VIDEO

    def prompt_settings(self, text: str, image: Tensor | None) -> dict[str, Any]:
        """Return the text length from the transformer's config."""
        return {
            **super().prompt_settings(text, image),
            "max_sequence_length": self.transformer.config.max_text_seq_length,
        }

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        spatial = 2 ** (len(self.vae.config.block_out_channels) - 1)
        return FRAMES_AT_ONCE, spatial * self.transformer.config.patch_size

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """For image-to-video, return the first frame: its pixels and the latents (B, C, 1, h, w) of a noisy copy."""
        if not self.uses_image():
            return {}
        first = self.first_frames(batch, video)
        noisy = first.clone()
        for row, seed in enumerate(batch.sample_seeds):
            generator = torch.Generator().manual_seed(seed)
            level = torch.exp(-3 + 0.5 * torch.randn((), generator=generator))
            noisy[row] += (level * torch.randn(first.shape[1:], generator=generator)).to(first)
        found = encode_clips(self.vae, noisy, self.config.posterior, batch.sample_seeds)
        scale = self.vae.config.scaling_factor
        return {
            "first_frame": as_pixels(first),
            "condition": found / scale**2 if self.vae.config.invert_scale_latents else found,
        }

    def losses(self, batch: Batch, drawn: NoiseDraw) -> Tensor:
        """Return the velocity loss per sample, with shape (B,)."""
        latents = self.latents_of(batch)
        steps = self.timesteps(drawn)
        alphas = losses.over(self.scheduler.alphas_cumprod.to(latents.device)[steps], latents)
        noisy = alphas.sqrt() * latents + (1 - alphas).sqrt() * drawn.noise
        target = alphas.sqrt() * drawn.noise - (1 - alphas).sqrt() * latents
        return losses.squared_error(self.predict(noisy, drawn, batch), target)

    def latents_of(self, batch: Batch) -> Tensor:
        """Return the padded latents to which noise is added."""
        return self.padded(super().latents_of(batch))

    def padded(self, latents: Tensor) -> Tensor:
        """Pad latents at the start with copies of their first frame if the transformer merges several frames."""
        num_added = -latents.shape[2] % (self.transformer.config.patch_size_t or 1)
        return torch.cat([latents[:, :, :1].expand(-1, -1, num_added, -1, -1), latents], dim=2)

    def timesteps(self, drawn: NoiseDraw) -> Tensor:
        """Return the integer timestep of each sample."""
        count = self.scheduler.config.num_train_timesteps
        steps: Tensor = (drawn.times * count).long()
        return steps.clamp(max=count - 1)

    def num_tokens(self, latents: Tensor) -> int:
        """Return 0, because the time shift does not depend on the number of tokens."""
        return 0

    def model_input(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return noisy latents and, for image-to-video, the first frame's latents padded with zeros."""
        if not self.uses_image():
            return noisy
        kept = (drawn.numbers < KEPT_IMAGES).view(-1, 1, 1, 1, 1)
        image = torch.where(kept, batch.condition.to(noisy), 0)
        return torch.cat([noisy, torch.cat([image, torch.zeros_like(noisy[:, :, 1:])], dim=2)], dim=1)

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the predicted velocity."""
        model, config = self.transformer, self.transformer.config
        tokens = self.model_input(noisy, drawn, batch).transpose(1, 2)
        found: Tensor = model(
            hidden_states=tokens.to(model.dtype),
            encoder_hidden_states=batch.prompt_embeds.to(model.dtype),
            timestep=self.timesteps(drawn),
            ofs=None if config.ofs_embed_dim is None else noisy.new_full((1,), 2.0),
            image_rotary_emb=self._rotary(tokens) if config.use_rotary_positional_embeddings else None,
            return_dict=False,
        )[0]
        return found.transpose(1, 2)

    def _rotary(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines that encode the positions of latents (B, t, C, h, w)."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed
        from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

        config = self.transformer.config
        (_, t, _, h, w), p, p_t = tokens.shape, config.patch_size, config.patch_size_t
        grid = (h // p, w // p)
        if p_t is None:
            crops = get_resize_crop_region_for_grid(grid, config.sample_width // p, config.sample_height // p)
            settings = {"crops_coords": crops, "temporal_size": t}
        else:
            settings = {"crops_coords": None, "temporal_size": t // p_t, "grid_type": "slice", "max_size": grid}
        dim = config.attention_head_dim
        return get_3d_rotary_pos_embed(embed_dim=dim, grid_size=grid, device=tokens.device, **settings)  # type: ignore[no-any-return]

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the guidance scale and, for image-to-video, the image."""
        image = {"image": as_image(batch.first_frame[row])} if self.uses_image() else {}
        return {"guidance_scale": self.config.guidance, **image}
