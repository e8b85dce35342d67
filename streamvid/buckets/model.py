"""Input requirements of a model (frame counts, sides and frame rate), and the number of tokens per clip."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from streamvid.buckets.bucket import MAX_NUM_FRAMES, Bucket
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import MAX_MULTIPLE, check_multiple
from streamvid.config import check_options, from_fields, option
from streamvid.errors import ConfigError

_MAX_FACTOR = 256


@dataclass(frozen=True, slots=True)
class ModelRule:
    """Input requirements of one model, as declared in presets.

    frame_rule: rule for the frame counts that the VAE accepts.
    multiple: widths and heights must be multiples of this number of pixels.
    fps: required frame rate. Cannot be combined with `max_fps`.
    max_fps: maximum frame rate. If neither `fps` nor `max_fps` is set, any rate is valid.
    max_num_frames: maximum frame count; None for no limit.
    vae_time: downsampling factor of the VAE along T.
    vae_space: downsampling factor of the VAE along H and along W.
    patch_time: latents per token along T.
    patch_space: latents per token along H and along W.
    Raises ConfigError for invalid values.
    """

    name: str
    frame_rule: FrameRule
    multiple: int = option(16, minimum=1, maximum=MAX_MULTIPLE)
    fps: Fraction | None = None
    max_fps: Fraction | None = None
    max_num_frames: int | None = option(None, minimum=1, maximum=MAX_NUM_FRAMES)
    vae_time: int = option(4, minimum=1, maximum=_MAX_FACTOR)
    vae_space: int = option(8, minimum=1, maximum=_MAX_FACTOR)
    patch_time: int = option(1, minimum=1, maximum=_MAX_FACTOR)
    patch_space: int = option(2, minimum=1, maximum=_MAX_FACTOR)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name={self.name!r}: must be the name of a model, such as 'wan2.1'")
        object.__setattr__(self, "frame_rule", FrameRule.of(self.frame_rule))
        check_options(self)
        if self.fps is not None and self.max_fps is not None:
            raise ConfigError(f"fps={self.fps!s} with max_fps={self.max_fps!s}: set only one of them")
        for name in ("fps", "max_fps"):
            rate = getattr(self, name)
            if rate is not None:  # rounded as in FrameRate, because the two rates are compared
                object.__setattr__(self, name, FrameRate("resample", rate).fps)

    def check(self, bucket: Bucket) -> None:
        """Raise ConfigError unless the model accepts the bucket. The message states the allowed values."""
        if not bucket.has_pictures:
            return
        where = f"bucket {bucket.id} for {self.name}"
        self.check_num_frames(bucket.num_frames, where)
        for name, side in (("width", bucket.width), ("height", bucket.height)):
            check_multiple(f"{where}: {name}", side, self.multiple)

    def check_num_frames(self, num_frames: int, where: str) -> None:
        """Raise ConfigError unless the model accepts clips of `num_frames` frames. The message starts with `where`.

        Images need not follow the frame rule, because the VAE of every video model accepts single frames.
        """
        if num_frames > 1:
            self.frame_rule.check(num_frames, where)
        if self.max_num_frames is not None and num_frames > self.max_num_frames:
            raise ConfigError(f"{where} has {num_frames} frames; at most {self.max_num_frames} are allowed")

    def check_rate(self, rate: FrameRate) -> None:
        """Raise ConfigError unless the model accepts clips that are read at `rate`.

        The message states the allowed rate.

        If `fps` is set, every clip must have exactly this rate. The "native" and "cap" rules do not guarantee this.
        """
        is_exact = rate.rule in ("resample", "fix_frame_rate")
        if self.fps is not None and not (is_exact and rate.fps == self.fps):
            raise ConfigError(
                f"clips are read at {_rate_name(rate)}, but {self.name} requires {self.fps} frames per second; shard "
                f"with --fps {self.fps} --fps-rule resample, or omit fps from the model's rule to accept any rate"
            )
        if self.max_fps is not None and (rate.fps is None or rate.fps > self.max_fps):
            raise ConfigError(
                f"clips are read at {_rate_name(rate)}, but {self.name} accepts at most {self.max_fps} frames per "
                f"second; shard with --fps {self.max_fps} --fps-rule cap, or omit max_fps from the model's rule"
            )

    def check_all(self, buckets: Iterable[Bucket], rate: FrameRate) -> None:
        """Call `check` for each bucket, and `check_rate` if any bucket contains videos."""
        buckets = tuple(buckets)
        for bucket in buckets:
            self.check(bucket)
        if not all(bucket.is_image or not bucket.has_pictures for bucket in buckets):
            self.check_rate(rate)

    def tokens(self, bucket: Bucket) -> int:
        """Return the number of tokens per sample, after patching the latents and rounding up.

        There are ((T - 1) / vae_time + 1) x H / vae_space x W / vae_space latents.
        """
        if not bucket.has_pictures:
            return bucket.tokens
        latent_frames = -(-(bucket.num_frames - 1) // self.vae_time) + 1
        side = self.vae_space * self.patch_space
        return -(-latent_frames // self.patch_time) * -(-bucket.height // side) * -(-bucket.width // side)

    @property
    def factors(self) -> tuple[int, int, int, int]:
        """Factors that determine the number of tokens. Models with equal factors have equal token counts."""
        return (self.vae_time, self.vae_space, self.patch_time, self.patch_space)

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON values for a manifest; `from_json` reads them."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: str(value) if isinstance(value, Fraction | FrameRule) else value for name, value in values.items()
        }

    @classmethod
    def from_json(cls, value: object) -> ModelRule:
        """Build a ModelRule from the result of `to_json`.

        Unknown fields are ignored. Raises ConfigError for invalid fields.
        """
        return from_fields(cls, value, "model")


def _rate_name(rate: FrameRate) -> str:
    if rate.fps is None:
        return "their own rates (native)"
    return f"at most {rate.fps} frames per second (cap)" if rate.rule == "cap" else f"{rate.fps} frames per second"
