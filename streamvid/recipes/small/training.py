"""Small training module: a text-to-video transformer with rectified flow, optionally conditioned on audio.

    encode   video ─► codec ─► latents (B, C, t, h, w)        text ─► text encoder ─► one state per token
             audio ─► audio encoder ─► one state per window, with `audio_window`
    forward  latents + noise at a random time, states ─► transformer ─► velocity loss per sample
    sample   noise ─► along the velocity ─► latents ─► codec ─► video

With task "sft:train", the output of `encode` comes from precomputed features, and no encoder is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from streamvid.config import Options, option, options_of, require
from streamvid.errors import ConfigError
from streamvid.recipes.small.audio_encoder import NUM_BANDS, BandEncoder
from streamvid.recipes.small.autoencoder import Autoencoder, load_autoencoder
from streamvid.recipes.small.codec import PatchCodec, Size
from streamvid.recipes.small.flow import Velocity, draw_noise_and_times, guided, rectified_flow_loss, sample_by_euler
from streamvid.recipes.small.text_encoder import TextConfig, build_text_encoder, no_text, pad_states
from streamvid.recipes.small.transformer import VideoTransformer

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_DEFAULT_PATCH: Mapping[str, Size] = {"patch": (1, 8, 8), "autoencoder": (1, 2, 2)}


@dataclass(frozen=True, kw_only=True)
class SmallConfig(Options):
    """Configuration of the small training module."""

    dim: int = option(128, minimum=6, help="Width of the transformer.")
    depth: int = option(4, minimum=1, help="Number of transformer blocks.")
    heads: int = option(4, minimum=1, help="Number of attention heads.")
    codec: Literal["patch", "autoencoder"] = option(
        "patch", help="Space in which the model is trained: pixels, or the latents of an autoencoder."
    )
    patch: Size | None = option(
        None, help="Size of each token's patch, as (T, H, W).", shown_default="(1, 8, 8) pixels or (1, 2, 2) latents"
    )
    autoencoder: Path | None = option(
        None, help="File with the autoencoder's weights.", shown_default="the shipped weights"
    )
    text: TextConfig = option(
        default_factory=TextConfig, help="Text encoder: the name of a kind, or a mapping of options."
    )
    audio_window: int | None = option(
        None,
        minimum=128,
        help="Number of audio samples per audio state (an even number), or null to train without audio.",
    )
    time_shift: float = option(1.0, help="Time shift; values above 1 move the sampled times toward the noise.")
    sample_steps: int = option(20, minimum=1, help="Number of sampling steps.")
    guidance: float = option(1.0, minimum=0, help="Classifier-free guidance scale for sampling; 1 means no guidance.")
    seed: int = option(0, minimum=0, maximum=2**63 - 1, help="Seed for the initial weights.")

    def __post_init__(self) -> None:
        if isinstance(self.text, str):
            object.__setattr__(self, "text", options_of(TextConfig, {"kind": self.text}, "text"))
        super().__post_init__()
        if self.patch is not None:
            object.__setattr__(self, "patch", tuple(self.patch))
        if self.autoencoder is not None:
            object.__setattr__(self, "autoencoder", Path(self.autoencoder))
            if self.codec != "autoencoder":
                raise ConfigError(
                    f"autoencoder is {str(self.autoencoder)!r}, but codec is {self.codec!r}; omit autoencoder, or set "
                    "codec to 'autoencoder'"
                )
        is_divided = self.dim % 2 == 0 and self.dim % self.heads == 0
        require(is_divided, "dim", self.dim, f"an even number that is at least 6 and divisible by heads={self.heads}")
        patch = self.token_size
        require(len(patch) == 3 and min(patch) >= 1, "patch", patch, "three sizes (T, H, W) of at least 1")
        even = self.audio_window is None or self.audio_window % 2 == 0
        require(even, "audio_window", self.audio_window, "an even number of at least 128, or null")
        require(0 < self.time_shift < float("inf"), "time_shift", self.time_shift, "a finite number above 0")
        require(self.guidance < float("inf"), "guidance", self.guidance, "a finite number")

    @property
    def token_size(self) -> Size:
        """Value of `patch`, or the default value for the configured codec."""
        return self.patch or _DEFAULT_PATCH[self.codec]

    def build_codec(self) -> PatchCodec | Autoencoder:
        """Build the frozen codec on the CPU. Raises ConfigError if it cannot be loaded."""
        with torch.device("cpu"):  # its weights are loaded, even if other parts are built without memory
            return PatchCodec(self.token_size) if self.codec == "patch" else load_autoencoder(self.autoencoder)


def build(*, task: str = "sft", **settings: Any) -> SmallTraining:
    """Build the small training module on the CPU. The global random state does not change.

    task: task of the run; for "sft:train", no encoders are built.
    settings: fields of SmallConfig.
    Raises ConfigError for invalid settings.
    """
    config = options_of(SmallConfig, settings, "model.args")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return SmallTraining(config, with_encoders=task != "sft:train")


class SmallTraining(nn.Module):
    """Small training module with a trainable child `transformer` and frozen `encoders`."""

    encoders: tuple[str, ...] = ("autoencoder", "text_encoder")
    encoder_args = (
        "audio_window",
        "autoencoder",
        "codec",
        "patch",
        "text",
    )  # features do not depend on the transformer

    def __init__(self, config: SmallConfig, with_encoders: bool = True) -> None:
        super().__init__()
        self.config = config
        if config.audio_window is not None:
            self.encoders = (*self.encoders, "audio_encoder")
        codec = config.build_codec()
        self.transformer = VideoTransformer(
            dim=config.dim,
            depth=config.depth,
            heads=config.heads,
            channels=codec.latent_shape((1, 1, 1))[0],
            patch=(1, 1, 1) if config.codec == "patch" else config.token_size,
            text_width=config.text.states_width,
            audio_width=0 if config.audio_window is None else NUM_BANDS,
        )
        if with_encoders:
            self.autoencoder = codec
            with torch.device("cpu"):
                self.text_encoder = build_text_encoder(config.text)
                if config.audio_window is not None:
                    self.audio_encoder = BandEncoder(config.audio_window)

    def train(self, mode: bool = True) -> SmallTraining:
        """Set training or eval mode for all parts except the encoders, which stay in eval mode."""
        super().train(mode)
        for name in self.encoders:
            if hasattr(self, name):
                getattr(self, name).eval()
        return self

    @torch.no_grad()
    def encode(self, batch: Batch) -> dict[str, Tensor | list[Tensor]]:
        """Return the float32 `latents` (B, C, t, h, w), and `text_states`, a list of B tensors (L_i, D).

        With `audio_window`, also return the float32 `audio_states` (B, M, A).
        """
        video = batch.normalized(torch.float32)
        video = video.permute(0, *(1 + batch.layout[1:].index(axis) for axis in "CTHW"))
        # One clip at a time, and in the memory layout of stored latents, because the last bits depend on both.
        latents = torch.cat([self.autoencoder.encode(clip[None]) for clip in video]).contiguous()
        found: dict[str, Tensor | list[Tensor]] = {"latents": latents, "text_states": self.text_encoder(batch.text)}
        return found if self.config.audio_window is None else found | {"audio_states": self._encode_audio(batch)}

    def _encode_audio(self, batch: Batch) -> Tensor:
        if "audio" not in batch:
            raise ConfigError(
                f"model.args.audio_window is {self.config.audio_window}, but the batches have no audio; set data.audio "
                "(for example, data.audio.sample_rate=16000), or set model.args.audio_window to null"
            )
        return torch.cat([self.audio_encoder(one[None]) for one in batch.audio])

    def encode_null(self) -> dict[str, Tensor]:
        """Return `text_states` (1, D) for an empty text."""
        return {"text_states": no_text(self.config.text.states_width, self.transformer.always.device)}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the float32 `loss` (B,). Each sample's time and noise are drawn from its seed."""
        return {"loss": self._losses(batch, self._velocity(batch))}

    @torch.no_grad()
    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """Return `loss` and, for the same noise, losses (B,) that show how much the model benefits from text and audio.

        These additional losses are `loss_without_text` and, in batches of several samples, `loss_with_other_audio`, for
        which each sample gets the audio of another sample.
        """
        found = {
            "loss": self._losses(batch, self._velocity(batch)),
            "loss_without_text": self._losses(batch, self._velocity(batch, with_text=False)),
        }
        if self.config.audio_window is not None and len(batch.text) > 1:
            other = batch.with_fields({"audio_states": self._audio_states(batch).roll(1, dims=0)})
            found["loss_with_other_audio"] = self._losses(other, self._velocity(other))
        return found

    @torch.no_grad()
    def sample(self, batch: Batch) -> Tensor:
        """Render a uint8 video of the bucket's size for each text in a batch. Return videos (B, 3, T, H, W).

        The noise is drawn from the batch's seeds.
        """
        device, size = self.transformer.always.device, batch.bucket.shape
        codec = self.autoencoder if hasattr(self, "autoencoder") else self.config.build_codec().to(device)
        noise, _ = draw_noise_and_times(codec.latent_shape(size), batch.sample_seeds, device)
        config = self.config
        with_text, without = self._velocity(batch), self._velocity(batch, with_text=False)

        def velocity(x: Tensor, times: Tensor) -> Tensor:
            if config.guidance == 1:
                return with_text(x, times)
            return guided(with_text(x, times), without(x, times), config.guidance)

        latents = sample_by_euler(velocity, noise, config.sample_steps, config.time_shift)
        video = codec.decode(latents, size).float()
        return ((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def _losses(self, batch: Batch, velocity: Velocity) -> Tensor:
        latents = batch.latents
        noise, times = draw_noise_and_times(
            latents.shape[1:], batch.sample_seeds, latents.device, self.config.time_shift
        )
        return rectified_flow_loss(velocity, latents, noise, times)

    def _velocity(self, batch: Batch, with_text: bool = True) -> Velocity:
        if not with_text:
            states, mask = pad_states([self.encode_null()["text_states"]] * len(batch.text))
        elif "text_states" in batch:
            states, mask = batch.text_states, batch.text_states_mask
        else:
            states, mask = pad_states(self.text_encoder(batch.text))
        audio = None if self.config.audio_window is None else self._audio_states(batch)
        return lambda x, times: self.transformer(x, times, states, mask, audio)

    def _audio_states(self, batch: Batch) -> Tensor:
        states: Tensor = batch.audio_states if "audio_states" in batch else self._encode_audio(batch)
        return states
