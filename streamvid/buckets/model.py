"""What a model asks of its input: frame counts, sides, frame rate, and how many tokens a clip becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.frames import FrameRule
from streamvid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelRule:
    """The rule of one model, as presets give it.

    frame_rule: counts that its VAE takes.  multiple: of widths and heights, in pixels.  fps: it was trained at; None:
    any.  vae_time, vae_space: pixels a latent, along T and along H and W.  patch_time, patch_space: latents a token.
    """

    name: str
    frame_rule: FrameRule
    multiple: int = 16
    fps: Fraction | None = None
    vae_time: int = 4
    vae_space: int = 8
    patch_time: int = 1
    patch_space: int = 2

    def check(self, bucket: Bucket) -> None:
        """ConfigError, naming bucket, rule and what is allowed, for a bucket that the model does not take."""
        if not bucket.is_image:
            self.frame_rule.check(bucket.num_frames, f"bucket {bucket.id} for {self.name}")
        for name, side in (("width", bucket.width), ("height", bucket.height)):
            if side % self.multiple:
                raise ConfigError(
                    f"bucket {bucket.id} for {self.name}: {name}={side} is not a multiple of {self.multiple}"
                )

    def tokens(self, bucket: Bucket) -> int:
        """Tokens of one sample: latents are ((T - 1) / vae_time + 1) x H / vae_space x W / vae_space, rounded up."""
        latent_frames = -(-(bucket.num_frames - 1) // self.vae_time) + 1
        side = self.vae_space * self.patch_space
        return -(-latent_frames // self.patch_time) * -(-bucket.height // side) * -(-bucket.width // side)

    def to_json(self) -> dict[str, Any]:
        """Plain fields, for a manifest; `from_json` reads them back."""
        value: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return {**value, "frame_rule": str(self.frame_rule), "fps": None if self.fps is None else str(self.fps)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ModelRule:
        """ModelRule of what `to_json` gave; unknown fields are passed over, anything unfit is a ConfigError."""
        try:
            known = {name: fields[name] for name in cls.__slots__ if name in fields}
            fps = known.get("fps")
            rule = FrameRule.parse(known["frame_rule"])
            return cls(**{**known, "frame_rule": rule, "fps": None if fps is None else Fraction(fps)})
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ConfigError(f"model={fields!r}: {error}") from error
