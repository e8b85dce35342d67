"""The small training module that ships: a video transformer with rectified flow, told by text what to show.

    encode   video ─► codec ─► latents (B, C, t, h, w)        text ─► text encoder ─► a state a token
    forward  latents + noise at a time, states ─► transformer ─► loss of its velocity, a sample
    sample   noise ─► along the velocity ─► latents ─► codec ─► video

What is encoded may come from sidecars instead ("sft:train"): then no encoder is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.recipes.autoencoder import Autoencoder, autoencoder_config, latent_shape, load_autoencoder
from streamvid.recipes.codec import PatchCodec, Size
from streamvid.recipes.flow import Velocity, draw_noise_and_times, guided, rectified_flow_loss, sample_by_euler
from streamvid.recipes.text_encoder import TextConfig, build_text_encoder, no_text, pad_states
from streamvid.recipes.transformer import VideoTransformer

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_DEFAULT_PATCH: Mapping[str, Size] = {"patch": (1, 8, 8), "autoencoder": (1, 2, 2)}


@dataclass(frozen=True, kw_only=True)
class SmallConfig:
    """The small training module.

    dim, depth, heads: of the transformer.
    codec: "patch" trains on pixels; "autoencoder" on the latents of the file `autoencoder`, or the one that ships.
    patch: (T, H, W) pixels, or latents of the autoencoder, that one token covers; None: (1, 8, 8), or (1, 2, 2).
    text: "bytes", or a mapping with the fields of TextConfig.
    time_shift: above 1 trains and samples more at times near the noise, where the text has most to say.
    sample_steps, guidance: steps from noise to a sample, and how far it follows the text (1: no guidance).
    seed: of the initial weights.
    """

    dim: int = 128
    depth: int = 4
    heads: int = 4
    codec: Literal["patch", "autoencoder"] = "patch"
    patch: Size | None = None
    autoencoder: Path | None = None
    text: TextConfig = field(default_factory=TextConfig)
    time_shift: float = 1.0
    sample_steps: int = 20
    guidance: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.codec not in _DEFAULT_PATCH:
            raise ConfigError(f"codec is {self.codec!r}; allowed: {', '.join(map(repr, _DEFAULT_PATCH))}")
        if self.autoencoder is not None and self.codec != "autoencoder":
            raise ConfigError(f"autoencoder is {str(self.autoencoder)!r} and codec {self.codec!r}; drop one of them")
        for name in ("depth", "heads", "sample_steps"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 and up")
        _require(
            self.dim >= 6 and self.dim % 2 == 0 and self.dim % self.heads == 0,
            *("dim", self.dim, f"an even number of 6 and up that heads={self.heads} divides"),
        )
        patch = self.cut
        _require(len(patch) == 3 and min(patch) >= 1, "patch", patch, "three sizes (T, H, W) of 1 and up")
        _require(0 < self.time_shift < float("inf"), "time_shift", self.time_shift, "a finite number above 0")
        _require(0 <= self.guidance < float("inf"), "guidance", self.guidance, "a finite number of 0 and up")
        _require(0 <= self.seed < 1 << 63, "seed", self.seed, "0 up to 2**63 - 1")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> SmallConfig:
        """A SmallConfig of plain values, as YAML has them. Raises ConfigError."""
        known = [known.name for known in fields(cls)]
        if unknown := sorted(set(settings) - set(known)):
            raise ConfigError(f"the small model has no {', '.join(unknown)}; allowed: {', '.join(known)}")
        plain = dict(settings)
        if plain.get("patch") is not None:
            plain["patch"] = tuple(plain["patch"])
        if plain.get("autoencoder") is not None:
            plain["autoencoder"] = Path(plain["autoencoder"])
        if "text" in plain:
            plain["text"] = TextConfig.of(plain["text"])
        return cls(**plain)

    @property
    def cut(self) -> Size:
        """`patch`, or what stands for None."""
        return self.patch or _DEFAULT_PATCH[self.codec]


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


def build(*, task: str = "sft", **settings: Any) -> SmallTraining:
    """The small training module, on the CPU, with the same weights for the same seed; global randomness is left alone.

    task: "sft:train" builds no encoder.   settings: the fields of SmallConfig. Raises ConfigError.
    """
    config = SmallConfig.of(settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return SmallTraining(config, with_encoders=task != "sft:train")


class SmallTraining(nn.Module):
    """Children: `transformer`, which trains, and the frozen `encoders`."""

    encoders: tuple[str, ...]
    encoder_args = ("autoencoder", "codec", "patch", "text")  # sidecars of a transformer are fit for others

    def __init__(self, config: SmallConfig, with_encoders: bool = True) -> None:
        super().__init__()
        self.config = config
        is_patch = config.codec == "patch"
        self.codec = PatchCodec(config.cut) if is_patch else None
        channels = self.codec.latent_shape((1, 1, 1))[0] if self.codec else self._autoencoder_channels()
        self.transformer = VideoTransformer(
            dim=config.dim, depth=config.depth, heads=config.heads, channels=channels,
            patch=(1, 1, 1) if is_patch else config.cut, text_width=config.text.states_width,
        )  # fmt: skip
        self.encoders = ("text_encoder",) if is_patch else ("autoencoder", "text_encoder")
        if with_encoders:
            # Their weights come with them, also where the rest is made without memory, to be filled later.
            with torch.device("cpu"):
                self.text_encoder = build_text_encoder(config.text)
                if not is_patch:
                    self.autoencoder = load_autoencoder(config.autoencoder)

    def train(self, mode: bool = True) -> SmallTraining:
        """As of any module; the encoders stay as they are used."""
        super().train(mode)
        for name in self.encoders:
            if hasattr(self, name):
                getattr(self, name).eval()
        return self

    @torch.no_grad()
    def encode(self, batch: Batch) -> dict[str, Tensor | list[Tensor]]:
        """`latents` float32 (B, C, t, h, w), and `text_states`, a list of B tensors (L_i, D)."""
        video = batch.normalized(torch.float32)
        video = video.permute(0, *(1 + batch.layout[1:].index(axis) for axis in "CTHW"))
        if self.codec is not None:
            latents = self.codec.encode(video)
        else:
            # Each alone: in a larger batch the last bits would differ, and the latents with the batch they are made in.
            latents = torch.cat([self.autoencoder.encode(clip[None]) for clip in video])
        return {"latents": latents, "text_states": self.text_encoder(batch.text)}

    def encode_null(self) -> dict[str, Tensor]:
        """`text_states` (1, D) of an empty text."""
        return {"text_states": no_text(self.config.text.states_width, self.transformer.always.device)}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """`loss` float32 (B,): of the velocity at a time and with noise that the sample's seed decides."""
        return {"loss": self._losses(batch, self._told(batch))}

    @torch.no_grad()
    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """As forward, and `loss_without_text` (B,) with the same noise: what the texts are worth to the model."""
        return self(batch) | {"loss_without_text": self._losses(batch, self._untold(batch))}  # type: ignore[no-any-return]

    @torch.no_grad()
    def sample(self, batch: Batch) -> Tensor:
        """uint8 (B, 3, T, H, W): videos of the batch's texts and shape, from the noise of its seeds."""
        device, size = self.transformer.always.device, batch.bucket.shape
        channels = self.transformer.channels
        shape = self.codec.latent_shape(size) if self.codec else latent_shape(channels, size)
        noise, _ = draw_noise_and_times(shape, batch.sample_seeds, device)
        config, told, untold = self.config, self._told(batch), self._untold(batch)

        def velocity(x: Tensor, times: Tensor) -> Tensor:
            if config.guidance == 1:
                return told(x, times)
            return guided(told(x, times), untold(x, times), config.guidance)

        latents = sample_by_euler(velocity, noise, config.sample_steps, config.time_shift)
        video = self._decoder().decode(latents, size).float()
        return ((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def _losses(self, batch: Batch, velocity: Velocity) -> Tensor:
        latents = batch.latents
        noise, times = draw_noise_and_times(
            latents.shape[1:], batch.sample_seeds, latents.device, self.config.time_shift
        )
        return rectified_flow_loss(velocity, latents, noise, times)

    def _told(self, batch: Batch) -> Velocity:
        if "text_states" in batch:
            states, mask = batch.text_states, batch.text_states_mask
        else:
            states, mask = pad_states(self.text_encoder(batch.text))
        return lambda x, times: self.transformer(x, times, states, mask)

    def _untold(self, batch: Batch) -> Velocity:
        states = self.encode_null()["text_states"].expand(len(batch.text), -1, -1)
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return lambda x, times: self.transformer(x, times, states, mask)

    def _decoder(self) -> PatchCodec | Autoencoder:
        if self.codec is not None:
            return self.codec
        if hasattr(self, "autoencoder"):
            return self.autoencoder
        return load_autoencoder(self.config.autoencoder).to(self.transformer.always.device)

    def _autoencoder_channels(self) -> int:
        return autoencoder_config(self.config.autoencoder).latent_channels
