"""LTX-2: flow matching with Gemma text states, on latents of video and, where a batch has audio, of audio.

Numbers and their sources:

- 1024 text tokens of Gemma, all layers, through the frozen `connectors` (`encode_prompt` and `__call__` of diffusers
  0.42.1, pipelines/ltx2/pipeline_ltx2.py). Their outputs are stored, because the input is 3840 · 49 numbers per
  token; samples therefore encode their texts again.
- audio: log-mel spectrograms with 1024-point transforms, the mean of the audio VAE, and its `latents_mean` and
  `latents_std` per channel and bin (`encode_audio`, Lightricks/LTX-2, packages/ltx-core/src/ltx_core/model/audio_vae/
  audio_vae.py at 2362161). Audio and video have the same time, and their losses are added
  (`FlowMatchSFTAudioVideoLoss`, DiffSynth-Studio, diffsynth/diffusion/loss.py at a5a54d83); the pipeline also denoises
  both at equal times.
- without audio: attention between video and audio is off (`isolate_modalities` of diffusers 0.42.1,
  models/transformers/transformer_ltx2.py), as in the official trainer with `audio: null`; one audio token of zeros
  satisfies the transformer's signature.
- positions: seconds and pixels, from the frame rate of each clip (`prepare_video_coords`, same file).
- timesteps per token, and a given first frame with timestep 0 that is excluded from the loss (Lightricks/LTX-2,
  packages/ltx-trainer/src/ltx_trainer/training_strategies/flexible.py at 4e277dd). Attention between video and audio
  is modulated by the time of the other modality (`use_cross_timestep`, the pipeline's default).
- time shift: by the number of tokens, from the scheduler's config (`calculate_shift` of the pipeline).
- latents: `latents_mean`, `latents_std` (buffers) and `scaling_factor` of the VAE.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from streamvid.config import options_of
from streamvid.plan.hashing import hash64
from streamvid.recipes.diffusion import losses
from streamvid.recipes.diffusion.audio import check_audio, encode_audio
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.times import NoiseDraw, uniform_numbers
from streamvid.recipes.diffusion.training import CLASSES
from streamvid.recipes.families.ltx import DEFAULT_RATE, LtxTraining, pack, per_token_times

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"max_text_tokens": 1024, "guidance": 4.0}


def build(*, task: str = "sft", **settings: Any) -> Ltx2Training:
    """Build the training module for the LTX-2 model in `model`. No random numbers are drawn.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return Ltx2Training(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class Ltx2Training(LtxTraining):
    """Training module for LTX-2."""

    PIPELINES = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("LTX2VideoTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {
        "vae": ("AutoencoderKLLTX2Video",),
        "text_encoder": ("Gemma3ForConditionalGeneration",),
        "connectors": ("LTX2TextConnectors",),
        "audio_vae": ("AutoencoderKLLTX2Audio",),
    }
    SAMPLERS: ClassVar[CLASSES] = {"vocoder": ("LTX2Vocoder", "LTX2VocoderWithBWE")}
    TEXT_PIPELINE = "LTX2Pipeline"

    def is_unused(self, name: str) -> bool:
        """Return True for parameters of the audio stream and of the attention between audio and video.

        These parameters are used only in batches with audio.
        """
        return re.search("audio|a2v|v2a|av_cross", name) is not None

    def _encode_one(self, text: str, image: Tensor | None) -> dict[str, Tensor]:
        found = self._text_states(text)
        side = self.__dict__["tokenizer"].padding_side
        connectors: Any = self.connectors
        connected = connectors(found["prompt_embeds"], found["prompt_attention_mask"], padding_side=side)
        return dict(zip(("video_text", "audio_text", "text_attention"), connected, strict=True))

    def _text_states(self, text: str) -> dict[str, Tensor]:
        return super()._encode_one(text, None)

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """For a batch with audio, also return normalized audio latents (B, L, C) and a mask of samples with audio."""
        found = super().conditions(batch, video)
        if "audio" not in batch:
            return found
        audio_vae: Any = self.audio_vae
        check_audio(batch, audio_vae.config.in_channels, audio_vae.config.sample_rate, "ltx-2")
        latents = encode_audio(audio_vae, batch.audio)
        return {**found, "audio_latents": latents, "has_audio": batch.audio_present.to(latents.device)}

    def losses(self, batch: Batch, drawn: NoiseDraw) -> Tensor:
        """Return the loss per sample, with shape (B,): the video loss, plus the audio loss if the sample has audio."""
        if "audio_latents" not in batch:
            return super().losses(batch, drawn)
        latents, audio, noise = self.latents_of(batch), batch.audio_latents.float(), self.audio_noise(batch)
        noisy, noisy_audio = self.noisy_latents(latents, drawn, batch), losses.mix(audio, noise, drawn.times)
        total, has_audio = torch.zeros_like(drawn.times), batch.has_audio.bool()
        for rows in (has_audio, ~has_audio):
            if not bool(rows.any()):
                continue
            given = noisy_audio[rows] if rows is has_audio else None
            of_video, of_audio = self._velocities(rows, noisy[rows], given, drawn, batch)
            errors = losses.squared_error(of_video, (drawn.noise - latents)[rows], drawn.given[rows])
            if given is not None:
                errors = errors + losses.squared_error(of_audio, (noise - audio)[rows])
            total = total.index_add(0, rows.nonzero()[:, 0], errors)
        return total * losses.weights_of(drawn.times, self.config.weighting, self.time_shift(latents))

    def audio_noise(self, batch: Batch) -> Tensor:
        """Draw noise for the audio latents of a batch, independent of the noise for its video."""
        latents = batch.audio_latents
        seeds = [hash64(seed, 1) & (2**63 - 1) for seed in batch.sample_seeds]
        return uniform_numbers(latents.shape[1:], seeds, latents.device)[0]

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the velocity predicted for the video without audio input."""
        return self._velocities(slice(None), noisy, None, drawn, batch)[0]

    def _velocities(
        self, rows: Any, noisy: Tensor, audio: Tensor | None, drawn: NoiseDraw, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the velocities of video latents (b, C, t, h, w) and of audio latents (b, L, C).

        rows: the rows of the batch to which the latents belong.
        """
        model, (t, h, w) = self.transformer, noisy.shape[2:]
        times, given = drawn.times[rows], drawn.given[rows]
        some = replace(drawn, times=times, given=given)
        tokens = noisy.new_zeros(len(noisy), 1, model.config.audio_in_channels) if audio is None else audio
        of_video, of_audio = model(
            hidden_states=pack(noisy).to(model.dtype),
            audio_hidden_states=tokens.to(model.dtype),
            encoder_hidden_states=batch.video_text[rows].to(model.dtype),
            audio_encoder_hidden_states=batch.audio_text[rows].to(model.dtype),
            timestep=per_token_times(some, noisy) * self.NUM_STEPS,
            audio_timestep=times * self.NUM_STEPS,
            sigma=times * self.NUM_STEPS,
            encoder_attention_mask=batch.text_attention[rows],
            audio_encoder_attention_mask=batch.text_attention[rows],
            num_frames=t,
            height=h,
            width=w,
            fps=batch.fps[rows].nan_to_num(DEFAULT_RATE).to(noisy).view(-1, 1, 1),
            audio_num_frames=tokens.shape[1],
            isolate_modalities=audio is None,
            use_cross_timestep=audio is not None,
            return_dict=False,
        )
        return of_video.transpose(1, 2).reshape(len(noisy), -1, t, h, w), of_audio

    def pipeline_name(self) -> str:
        """Return the name of the pipeline that renders samples."""
        return "LTX2ImageToVideoPipeline" if self.config.first_frame == 1 else "LTX2Pipeline"

    def text_arguments(self, batch: Batch, row: int) -> dict[str, Tensor]:
        """Return the text input for the pipeline's connectors. The input is computed here because it is not stored."""
        return self._text_states(batch.text[row])

    def negative_arguments(self) -> dict[str, Tensor]:
        """Return the input that represents an empty text to the pipeline's connectors."""
        return {f"negative_{name}": states for name, states in self._text_states("").items()}
