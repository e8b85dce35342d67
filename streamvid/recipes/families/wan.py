"""Wan 2.1 and 2.2: flow matching on latents of a causal VAE, with UMT5 text states.

Numbers and their sources (diffusers 0.42.1, pipelines/wan/pipeline_wan.py and pipeline_wan_i2v.py):

- 512 text tokens (`max_sequence_length`); states after the last token are zeros, and attention has no mask.
- timestep: 1000 · time (`num_train_timesteps` of the scheduler); time shift: `flow_shift` of the scheduler's config.
- experts: `transformer` for times of at least `boundary_ratio` of model_index.json, `transformer_2` for others.
- one timestep per token: `expand_timesteps` of model_index.json (TI2V-5B). A given first frame has timestep 0 and is
  excluded from the loss (DiffSynth-Studio, diffsynth/diffusion/loss.py at 0e6976a).
- image to video: the latents of the first frame followed by black frames, and 4 mask channels (`prepare_latents`);
  with Wan 2.1, also the second-to-last states of CLIP (`encode_image`).
- latents: `latents_mean` and `latents_std` of the VAE's config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from streamvid.config import options_of
from streamvid.errors import ConfigError
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import INDEX, open_folder
from streamvid.recipes.diffusion.latents import encode_clips
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.diffusion.training import CLASSES, DiffusionTraining, as_image, as_pixels, pad_text

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"max_text_tokens": 512, "time_sampling": "uniform"}
IMAGE_TO_VIDEO = "WanImageToVideoPipeline"
EXPERTS = {"high": ("transformer",), "low": ("transformer_2",), "both": ("transformer", "transformer_2")}


def build(*, task: str = "sft", **settings: Any) -> WanTraining:
    """Build the training module for the Wan model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return WanTraining(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class WanTraining(DiffusionTraining):
    """Training module for Wan."""

    PIPELINES: ClassVar[tuple[str, ...]] = ("WanPipeline", IMAGE_TO_VIDEO)
    DENOISERS: ClassVar[CLASSES] = dict.fromkeys(("transformer", "transformer_2"), ("WanTransformer3DModel",))
    ENCODERS: ClassVar[CLASSES] = {
        "vae": ("AutoencoderKLWan",),
        "text_encoder": ("UMT5EncoderModel",),
        "image_encoder": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    }
    TOKENIZERS: ClassVar[tuple[str, ...]] = ("tokenizer", "image_processor")
    TEXT_PIPELINE = "WanPipeline"  # that of images fails without the package ftfy
    TEXT_OUTPUTS = ("prompt_embeds",)

    def denoiser_names(self) -> tuple[str, ...]:
        """Return the names of the experts that are trained."""
        has_two = self.folder.class_of("transformer_2") is not None
        if has_two and self.folder.setting("boundary_ratio", None) is None:
            raise ConfigError(
                f"{self.folder.root / INDEX} has transformer_2 but no boundary_ratio; download the model again"
            )
        if self.config.expert is not None and not has_two:
            raise ConfigError(
                f"model.args.expert={self.config.expert}: {self.folder.root} has only one expert; omit "
                "model.args.expert"
            )
        return EXPERTS[self.config.expert or "high"] if has_two else ("transformer",)

    def takes_first_frame(self) -> bool:
        """Return True for a model with one timestep per token."""
        return bool(self.folder.setting("expand_timesteps", False))

    def interval(self) -> tuple[float, float]:
        """Return the interval of times for which the trained expert is used."""
        low = self.folder.setting("boundary_ratio", 0.0) if self.denoiser_names() == ("transformer",) else 0.0
        return low, self.folder.setting("boundary_ratio", 1.0) if self.denoiser_names() == ("transformer_2",) else 1.0

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        config = self.vae.config
        return config.scale_factor_temporal, config.scale_factor_spatial * self.denoiser.config.patch_size[1]

    def encode_text(self, texts: list[str], images: Tensor | None = None) -> dict[str, Tensor | list[Tensor]]:
        """Return the text states as B tensors (L_i, D), without the zeros after the last token."""
        states = super().encode_text(texts, images)["prompt_embeds"]
        lengths = [int(row.any(dim=-1).nonzero().max()) + 1 for row in states]
        return {"prompt_embeds": [row[:length] for row, length in zip(states, lengths, strict=True)]}

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """For image-to-video, return the first frame: its pixels, latents and CLIP states."""
        if not self.uses_image():
            return {}
        first = self.first_frames(batch, video)
        found = {"first_frame": as_pixels(first)}
        if self.folder.pipeline == IMAGE_TO_VIDEO:
            padded = torch.cat([first, torch.zeros_like(video[:, :, 1:])], dim=2)
            found["condition"] = encode_clips(self.vae, padded, "mean", batch.sample_seeds)
        if "image_encoder" in self.encoders:
            pipe = self.pipeline()
            rows = [pipe.encode_image(as_image(pixels), video.device) for pixels in found["first_frame"]]
            found["image_embeds"] = torch.cat(rows)
        return found

    def uses_image(self) -> bool:
        """Return True if samples are rendered from an image."""
        return self.folder.pipeline == IMAGE_TO_VIDEO or self.config.first_frame == 1

    def pipeline_name(self) -> str:
        """Return the name of the pipeline that renders samples."""
        return IMAGE_TO_VIDEO if self.uses_image() else "WanPipeline"

    def pipeline_settings(self) -> dict[str, Any]:
        """Return the settings in model_index.json."""
        return {name: self.folder.setting(name, None) for name in ("boundary_ratio", "expand_timesteps")}

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the predicted velocity. Each sample's time determines which expert predicts it."""
        models = [getattr(self, name) for name in self.denoiser_names()]
        if len(models) == 1:
            return self._velocity(models[0], slice(None), noisy, drawn, batch)
        is_high = drawn.times >= self.folder.setting("boundary_ratio", None)
        found = torch.zeros_like(noisy)
        for model, rows in zip(models, (is_high, ~is_high), strict=True):
            # An expert without samples runs on one, times zero: DDP and FSDP need every parameter in every step.
            chosen = rows if bool(rows.any()) else torch.arange(len(rows), device=rows.device) == 0
            velocity = self._velocity(model, chosen, noisy, drawn, batch).float()
            found = found.index_add(0, chosen.nonzero()[:, 0], velocity * rows[chosen].view(-1, 1, 1, 1, 1))
        return found

    def _velocity(self, model: Any, rows: Any, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        noisy, times, given = noisy[rows], drawn.times[rows] * self.NUM_STEPS, drawn.given[rows]
        if "condition" in batch:
            mask = torch.zeros_like(noisy[:, :4])
            mask[:, :, 0] = 1
            noisy = torch.cat([noisy, mask, batch.condition[rows].to(noisy)], dim=1)
        if self.takes_first_frame():
            per_frame = times[:, None].expand(-1, noisy.shape[2]).clone()
            per_frame[given, 0] = 0
            times = per_frame.repeat_interleave(self.num_tokens(noisy) // noisy.shape[2], dim=1)
        found: Tensor = model(
            hidden_states=noisy.to(model.dtype),
            timestep=times,
            encoder_hidden_states=self._states(batch.prompt_embeds)[rows].to(model.dtype),
            return_dict=False,
            **{name: states[rows].to(model.dtype) for name, states in self.other_inputs(batch).items()},
        )[0]
        return found

    def other_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return additional inputs for the transformer, by name. Each input has shape (B, …)."""
        return {"encoder_hidden_states_image": batch.image_embeds} if "image_embeds" in batch else {}

    def prompt_arguments(self, texts: dict[str, Any]) -> dict[str, Tensor]:
        """Return padded text states."""
        return {name: self._states(rows[0][None] if isinstance(rows, list) else rows) for name, rows in texts.items()}

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the guidance scale and, for image-to-video, the image."""
        image = {"image": as_image(batch.first_frame[row])} if self.uses_image() else {}
        return {"guidance_scale": self.config.guidance, **image}

    def _states(self, states: Tensor) -> Tensor:
        assert self.config.max_text_tokens is not None
        return pad_text(states, self.config.max_text_tokens)
