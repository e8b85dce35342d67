"""Wan 2.1 and 2.2: flow matching on latents of a causal VAE, with UMT5 text states.

Numbers and where they come from (diffusers 0.42.1, pipelines/wan/pipeline_wan.py and pipeline_wan_i2v.py):

- 512 text tokens (`max_sequence_length`); states after the last token are zeros, and attention has no mask.
- timestep: 1000 · time (`num_train_timesteps` of the scheduler); time shift: `flow_shift` of the scheduler's config.
- expert boundary: `boundary_ratio` of model_index.json. `transformer` is for times at or above it.
- one timestep per token: `expand_timesteps` of model_index.json (TI2V-5B).
- latents: `latents_mean` and `latents_std` of the VAE's config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from streamvid.config import options_of
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.times import Draw
from streamvid.recipes.diffusion.training import CLASSES, DiffusionTraining, pad_text

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"max_text_tokens": 512, "time_sampling": "uniform"}


def build(*, task: str = "sft", **settings: Any) -> WanTraining:
    """Build the training module of the Wan model in `model`. Draws no random numbers.

    task: task of the run; "sft:train" builds no encoders.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, and for a folder that is not of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return WanTraining(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class WanTraining(DiffusionTraining):
    """Training module of Wan, text to video."""

    PIPELINE = "WanPipeline"
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("WanTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {"vae": ("AutoencoderKLWan",), "text_encoder": ("UMT5EncoderModel",)}
    TEXT_OUTPUTS = ("prompt_embeds",)

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        config = self.vae.config
        return config.scale_factor_temporal, config.scale_factor_spatial * self.denoiser.config.patch_size[1]

    def encode_text(self, texts: list[str]) -> dict[str, Tensor | list[Tensor]]:
        """Return text states, B tensors (L_i, D), without the zeros behind the last token."""
        states = super().encode_text(texts)["prompt_embeds"]
        lengths = [int(row.any(dim=-1).nonzero().max()) + 1 for row in states]
        return {"prompt_embeds": [row[:length] for row, length in zip(states, lengths, strict=True)]}

    def predict(self, noisy: Tensor, drawn: Draw, batch: Batch) -> Tensor:
        """Return the velocity."""
        model = self.transformer
        found: Tensor = model(
            hidden_states=noisy.to(model.dtype),
            timestep=drawn.times * self.NUM_STEPS,
            encoder_hidden_states=self._states(batch.prompt_embeds).to(model.dtype),
            return_dict=False,
        )[0]
        return found

    def prompt_arguments(self, texts: dict[str, Any]) -> dict[str, Any]:
        """Return padded text states."""
        return {name: self._states(rows[0][None] if isinstance(rows, list) else rows) for name, rows in texts.items()}

    def _states(self, states: Tensor) -> Tensor:
        assert self.config.max_text_tokens is not None
        return pad_text(states, self.config.max_text_tokens)
