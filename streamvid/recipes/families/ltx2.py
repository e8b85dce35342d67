"""LTX-2, video only: flow matching with Gemma text states; the audio stream of the transformer is not trained.

Numbers and their sources:

- 1024 text tokens of Gemma, all layers, through the frozen `connectors` (`encode_prompt` and `__call__` of diffusers
  0.42.1, pipelines/ltx2/pipeline_ltx2.py). Their outputs are stored, because the input is 3840 · 49 numbers per token;
  samples therefore encode their texts again.
- without audio: attention between video and audio is off (`isolate_modalities` of diffusers 0.42.1,
  models/transformers/transformer_ltx2.py), as in the official trainer with `audio: null`; one audio token of zeros
  satisfies the transformer's signature.
- positions: seconds and pixels, from the frame rate of each clip (`prepare_video_coords`, same file).
- timesteps per token, and a given first frame with timestep 0 that is excluded from the loss (Lightricks/LTX-2,
  packages/ltx-trainer/src/ltx_trainer/training_strategies/flexible.py at 4e277dd).
- time shift: by the number of tokens, from the scheduler's config (`calculate_shift` of the pipeline).
- latents: `latents_mean`, `latents_std` (buffers) and `scaling_factor` of the VAE.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from streamvid.config import options_of
from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.folder import open_folder
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.diffusion.training import CLASSES
from streamvid.recipes.families.ltx import DEFAULT_RATE, LtxTraining, pack, per_token_times

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

DEFAULTS = {"max_text_tokens": 1024, "guidance": 4.0}


def build(*, task: str = "sft", **settings: Any) -> Ltx2Training:
    """Build the training module of the LTX-2 model in `model`. No random numbers are drawn.

    task: task of the run; "sft:train" builds no encoders.
    settings: fields of DiffusionConfig.
    Raises ConfigError for invalid settings, or if the folder contains no model of this family.
    """
    config = options_of(DiffusionConfig, DEFAULTS | settings, "model.args")
    return Ltx2Training(open_folder(config.model, config.download), config, with_encoders=task != "sft:train")


class Ltx2Training(LtxTraining):
    """Training module of LTX-2."""

    PIPELINES = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")
    DENOISERS: ClassVar[CLASSES] = {"transformer": ("LTX2VideoTransformer3DModel",)}
    ENCODERS: ClassVar[CLASSES] = {
        "vae": ("AutoencoderKLLTX2Video",),
        "text_encoder": ("Gemma3ForConditionalGeneration",),
        "connectors": ("LTX2TextConnectors",),
    }
    SAMPLERS: ClassVar[CLASSES] = {
        "audio_vae": ("AutoencoderKLLTX2Audio",),
        "vocoder": ("LTX2Vocoder", "LTX2VocoderWithBWE"),
    }
    TEXT_PIPELINE = "LTX2Pipeline"

    def is_unused(self, name: str) -> bool:
        """Return True for the audio stream and its attention to and from the video."""
        return re.search("audio|a2v|v2a|av_cross", name) is not None

    def _encode_one(self, text: str, image: Tensor | None) -> dict[str, Tensor]:
        found = self._text_states(text)
        side = self.__dict__["tokenizer"].padding_side
        connectors: Any = self.connectors
        connected = connectors(found["prompt_embeds"], found["prompt_attention_mask"], padding_side=side)
        return dict(zip(("video_text", "audio_text", "text_attention"), connected, strict=True))

    def _text_states(self, text: str) -> dict[str, Tensor]:
        return super()._encode_one(text, None)

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the velocity of the video."""
        model, (t, h, w) = self.transformer, noisy.shape[2:]
        found: Tensor = model(
            hidden_states=pack(noisy).to(model.dtype),
            audio_hidden_states=noisy.new_zeros(len(noisy), 1, model.config.audio_in_channels).to(model.dtype),
            encoder_hidden_states=batch.video_text.to(model.dtype),
            audio_encoder_hidden_states=batch.audio_text.to(model.dtype),
            timestep=per_token_times(drawn, noisy) * self.NUM_STEPS,
            audio_timestep=drawn.times * self.NUM_STEPS,
            sigma=drawn.times * self.NUM_STEPS,
            encoder_attention_mask=batch.text_attention,
            audio_encoder_attention_mask=batch.text_attention,
            num_frames=t,
            height=h,
            width=w,
            fps=batch.fps.nan_to_num(DEFAULT_RATE).to(noisy).view(-1, 1, 1),
            audio_num_frames=1,
            isolate_modalities=True,
            return_dict=False,
        )[0]
        return found.transpose(1, 2).reshape(len(noisy), -1, t, h, w)

    def pipeline_name(self) -> str:
        """Return the name of the pipeline that renders samples."""
        return "LTX2ImageToVideoPipeline" if self.config.first_frame == 1 else "LTX2Pipeline"

    def text_arguments(self, batch: Batch, row: int) -> dict[str, Tensor]:
        """Return the pipeline's input before the connectors, which is not stored."""
        return self._text_states(batch.text[row])

    def negative_arguments(self) -> dict[str, Tensor]:
        """Return the pipeline's input before the connectors for an empty text."""
        return {f"negative_{name}": states for name, states in self._text_states("").items()}
