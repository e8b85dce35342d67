"""Options that all recipes of diffusion models share. Each family sets its own defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from streamvid.config import Options, option, require
from streamvid.errors import refuse_credentials

if TYPE_CHECKING:
    import torch

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
Sampling: TypeAlias = Literal["uniform", "logit-normal"]
Weighting: TypeAlias = Literal["none", "bell", "cosmap", "sigma-sqrt"]
Expert: TypeAlias = Literal["high", "low", "both"]


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(Options):
    """Options for a diffusion recipe."""

    model: str = option(help="Folder of a diffusers pipeline or, with download: true, its id on the Hugging Face Hub.")
    download: bool = option(False, help="Download `model` from the Hugging Face Hub.")
    transformer: str | None = option(
        None, help="Safetensors file with the transformer's weights.", shown_default="those in `model`"
    )
    transformer_2: str | None = option(
        None,
        help=("Safetensors file with the weights for Wan 2.2's second expert."),
        shown_default="those in `model`",
    )
    dtype: Precision = option(
        "float32", help="Precision of the transformer's frozen weights; trained weights are float32."
    )
    encoder_dtype: Precision = option("bfloat16", help="Precision of the text and image encoders.")
    vae_dtype: Precision = option("float32", help="Precision of the VAE.")
    posterior: Literal["mean", "sample"] = option(
        "mean",
        help="Latents to use: the mean of the VAE's distribution, or a draw from it with the sample's seed.",
    )
    max_text_tokens: int | None = option(
        None, minimum=1, help="Maximum text length in tokens.", shown_default="the family's"
    )
    time_sampling: Sampling = option(
        "logit-normal", help="Distribution of diffusion times in training, before the shift."
    )
    logit_mean: float = option(0.0, help="Mean of the logit-normal distribution.")
    logit_std: float = option(1.0, above=0, help="Standard deviation of the logit-normal distribution.")
    time_shift: float | None = option(
        None,
        above=0,
        help="Shift of diffusion times toward noise in training.",
        shown_default="from the scheduler's config",
    )
    weighting: Weighting = option("none", help="Loss weighting as a function of diffusion time.")
    image: str | None = option(
        None, help="Conditioning input that contains the first frames.", shown_default="the first frame of each clip"
    )
    first_frame: float = option(
        0.0,
        minimum=0,
        maximum=1,
        help="Probability of training a sample with a clean first frame, for models that support this.",
    )
    expert: Expert | None = option(None, help="Expert to train, for models with two experts.", shown_default="high")
    validation_times: tuple[float, ...] = option(
        (0.1, 0.3, 0.5, 0.7, 0.9), help=("Diffusion times at which the held-out loss is computed.")
    )
    sample_steps: int = option(30, minimum=1, help="Number of sampling steps.")
    guidance: float = option(5.0, minimum=0, help="Guidance scale for sampling.")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_credentials("model", self.model)
        object.__setattr__(self, "validation_times", tuple(self.validation_times))
        times = self.validation_times
        require(bool(times) and all(0 < one < 1 for one in times), "validation_times", times, "numbers between 0 and 1")


ENCODER_ARGS = ("model", "encoder_dtype", "vae_dtype", "posterior", "max_text_tokens", "image")
"""Options on which the output of `encode` depends."""


def torch_dtype(name: Precision) -> torch.dtype:
    """Return the torch dtype with this name."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
