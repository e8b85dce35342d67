"""Training module of a diffusion model over the components of a diffusers pipeline.

Children have the names of the pipeline's components. A family's module specifies which classes they may have, what its
text encoders return, and how its transformer is called; everything else is shared.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from streamvid.errors import ConfigError
from streamvid.recipes.diffusion import latents as latent_space
from streamvid.recipes.diffusion import losses
from streamvid.recipes.diffusion.config import ENCODER_ARGS, DiffusionConfig, torch_dtype
from streamvid.recipes.diffusion.folder import INDEX, ModelFolder
from streamvid.recipes.diffusion.inputs import channels_first
from streamvid.recipes.diffusion.times import NoiseDraw, scheduler_shift, times_of, uniform_numbers

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_log = logging.getLogger(__name__)

CLASSES = Mapping[str, tuple[str, ...]]


class DiffusionTraining(nn.Module):
    """Training module for a diffusion model. Each family sets the uppercase attributes.

    PIPELINES: names of the diffusers pipelines that the family trains.
    DENOISERS: components that are trained, with their allowed classes.
    ENCODERS: frozen components that only `encode` uses, with their allowed classes.
    SAMPLERS: frozen components that only sampling needs, with their allowed classes.
    TOKENIZERS: names of tokenizers and image processors.
    TEXT_PIPELINE: name of the pipeline whose `encode_prompt` encodes texts; None for the pipeline that renders samples.
    TEXT_OUTPUTS: names for the outputs of the pipeline's `encode_prompt`, in order; None for an output that is ignored.
        They are also the names of batch fields and of arguments for the pipeline's call.
    MAX_TEXT: name of the `encode_prompt` argument that sets the maximum text length, or None.
    NUM_STEPS: value of the transformer's timestep input at time 1.
    """

    PIPELINES: ClassVar[tuple[str, ...]]
    DENOISERS: ClassVar[CLASSES]
    ENCODERS: ClassVar[CLASSES]
    SAMPLERS: ClassVar[CLASSES] = MappingProxyType({})
    TOKENIZERS: ClassVar[tuple[str, ...]] = ("tokenizer",)
    TEXT_OUTPUTS: ClassVar[tuple[str | None, ...]]
    TEXT_PIPELINE: ClassVar[str | None] = None
    MAX_TEXT: ClassVar[str | None] = "max_sequence_length"
    NUM_STEPS: ClassVar[float] = 1000.0

    _has_warned_of_captions = False

    encoder_args = ENCODER_ARGS
    transformer: Any
    transformer_2: Any
    vae: Any

    def __init__(self, folder: ModelFolder, config: DiffusionConfig, with_encoders: bool = True) -> None:
        super().__init__()
        self.config = config
        self.folder = folder
        if folder.pipeline not in self.PIPELINES:
            raise ConfigError(
                f"{folder.root / INDEX}: _class_name is {folder.pipeline}, but this recipe needs "
                f"{' or '.join(self.PIPELINES)}; choose the recipe for this model's family"
            )
        self.scheduler = folder.scheduler()
        if config.first_frame and not self.takes_first_frame():
            raise ConfigError(
                f"first_frame is {config.first_frame}, but the model in {folder.root} does not accept a clean "
                "first frame; set first_frame to 0"
            )
        self.encoders = self.encoder_names()
        for name in self.denoiser_names():
            setattr(self, name, self._loaded(name).requires_grad_(True))
        if with_encoders:
            for name in self.encoders:
                setattr(self, name, self._encoder(name))

    def denoiser_names(self) -> tuple[str, ...]:
        """Return the names of the components that are trained."""
        return tuple(name for name in self.DENOISERS if self.folder.class_of(name) is not None)

    def encoder_names(self) -> tuple[str, ...]:
        """Return the names of the frozen components that only `encode` uses."""
        return tuple(name for name in self.ENCODERS if self.folder.class_of(name) is not None)

    def takes_first_frame(self) -> bool:
        """Return True if the model can be conditioned on the first frame of some samples in a batch."""
        return False

    def is_unused(self, name: str) -> bool:
        """Return True if, for some or all batches, the loss does not depend on the parameter with this name."""
        return False

    @property
    def has_unused_parameters(self) -> bool:
        """True if a trainable parameter might not receive a gradient."""
        return any(one.requires_grad and self.is_unused(name) for name, one in self.named_parameters())

    def _encoder(self, name: str) -> nn.Module:
        """Load a frozen component: an encoder, or a denoiser that is not trained."""
        return self._loaded(name).requires_grad_(False)

    def _loaded(self, name: str) -> nn.Module:
        config = self.config
        decodes = name.endswith("vae") or name in self.SAMPLERS
        dtype = config.dtype if name in self.DENOISERS else config.vae_dtype if decodes else config.encoder_dtype
        allowed = {**self.DENOISERS, **self.ENCODERS, **self.SAMPLERS}[name]
        file = getattr(config, name) if name in self.DENOISERS else None
        return self.folder.load(name, allowed, torch_dtype(dtype), file)

    @property
    def denoiser(self) -> Any:
        """First component that is trained."""
        return getattr(self, self.denoiser_names()[0])

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        found: torch.device = next(self.denoiser.parameters()).device
        return found

    # Encoding

    @torch.no_grad()
    def encode(self, batch: Batch) -> dict[str, Tensor | list[Tensor]]:
        """Return the float32 `latents` (B, C, t, h, w), the encoded texts, and the family's conditions."""
        video = channels_first(batch, batch.normalized(torch.float32))
        self.check_size((video.shape[2], video.shape[3], video.shape[4]), batch.bucket.id)
        found = latent_space.encode_clips(self.vae, video, self.config.posterior, batch.sample_seeds)
        conditions = self.conditions(batch, video)
        self._warn_without_captions(batch)
        return {"latents": found, **conditions, **self.encode_text(batch.text, conditions.get("first_frame"))}

    def _warn_without_captions(self, batch: Batch) -> None:
        if not self._has_warned_of_captions and not any(batch.text):
            self._has_warned_of_captions = True
            _log.warning(
                "no sample in a batch (for example, %s) has a caption, so the model trains with empty captions; shard "
                "with captions: a .txt file next to each video, or --metadata FILE",
                ", ".join(batch.sample_keys[:3]),
            )

    def conditions(self, batch: Batch, video: Tensor) -> dict[str, Tensor]:
        """Return the tensors that the transformer needs in addition to latents and texts.

        video: float tensor (B, 3, T, H, W) with values in -1..1.
        """
        return {}

    def encode_text(self, texts: list[str], images: Tensor | None = None) -> dict[str, Tensor | list[Tensor]]:
        """Encode texts with the pipeline's `encode_prompt`. Return its outputs by name, each with shape (B, …).

        images: uint8 (B, 3, H, W), for text encoders that see the first frame.
        """
        # One text at a time, because the last bits depend on the batch.
        rows = [self._encode_one(text, None if images is None else images[row]) for row, text in enumerate(texts)]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _encode_one(self, text: str, image: Tensor | None) -> dict[str, Tensor]:
        settings: dict[str, Any] = {"device": self.device, **self.prompt_settings(text, image)}
        if self.MAX_TEXT is not None and self.config.max_text_tokens is not None:
            settings[self.MAX_TEXT] = self.config.max_text_tokens
        found = self.pipeline(self.TEXT_PIPELINE).encode_prompt(prompt=text, **settings)
        named = zip(self.TEXT_OUTPUTS, found, strict=False)
        return {name: tensor for name, tensor in named if name is not None}

    def prompt_settings(self, text: str, image: Tensor | None) -> dict[str, Any]:
        """Return additional arguments for the pipeline's `encode_prompt`.

        image: uint8 (3, H, W), if the recipe uses an image.
        """
        return {"do_classifier_free_guidance": False}

    @torch.no_grad()
    def encode_null(self) -> dict[str, Tensor]:
        """Return the encoding of an empty text, without a batch dimension."""
        return {name: rows[0] for name, rows in self.encode_text([""]).items()}

    # Training

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the float32 `loss` (B,). Each sample's noise and time are drawn from its seed."""
        return {"loss": self.losses(batch, self.draw(batch))}

    @torch.no_grad()
    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of each sample at each of `validation_times`, and the mean over these times as `loss`.

        All losses have shape (B,). The noise is the same at all times.
        """
        drawn = self.draw(batch)
        found = {}
        low, high = self.interval()
        inside = [time for time in self.config.validation_times if low <= time < high]
        for time in inside or [(low + high) / 2]:
            times = torch.full_like(drawn.times, time)
            found[f"loss_at_{time:g}"] = self.losses(batch, replace(drawn, times=times))
        return {"loss": torch.stack(list(found.values())).mean(dim=0), **found}

    def draw(self, batch: Batch) -> NoiseDraw:
        """Draw noise and times for a batch from its seeds."""
        latents = self.latents_of(batch)
        noise, numbers = uniform_numbers(latents.shape[1:], batch.sample_seeds, latents.device)
        times = times_of(numbers[:, 0], self.config, self.time_shift(latents), self.interval())
        given = (numbers[:, 1] < self.config.first_frame) & (latents.shape[2] > 1)
        return NoiseDraw(noise, times, numbers[:, 1], given)

    def latents_of(self, batch: Batch) -> Tensor:
        """Return the float32 latents (B, C, t, h, w) to which noise is added."""
        found: Tensor = batch.latents.float()
        return found

    def time_shift(self, latents: Tensor) -> float:
        """Return the shift of diffusion times for latents (B, C, t, h, w)."""
        if self.config.time_shift is not None:
            return self.config.time_shift
        return scheduler_shift(self.scheduler.config, self.num_tokens(latents))

    def num_tokens(self, latents: Tensor) -> int:
        """Return the number of tokens per sample for latents (B, C, t, h, w)."""
        patch = self.denoiser.config.patch_size
        t, h, w = patch if isinstance(patch, list | tuple) else (1, patch, patch)
        return int((latents.shape[2] // t) * (latents.shape[3] // h) * (latents.shape[4] // w))

    def interval(self) -> tuple[float, float]:
        """Return the interval within 0..1 from which times are drawn."""
        return (0.0, 1.0)

    def losses(self, batch: Batch, drawn: NoiseDraw) -> Tensor:
        """Return the weighted flow-matching loss per sample, with shape (B,)."""
        latents = self.latents_of(batch)
        predicted = self.predict(self.noisy_latents(latents, drawn, batch), drawn, batch)
        errors = losses.squared_error(predicted, drawn.noise - latents, drawn.given)
        return errors * losses.weights_of(drawn.times, self.config.weighting, self.time_shift(latents))

    def noisy_latents(self, latents: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return latents with added noise. No noise is added to first frames that are inputs to the model."""
        noisy = losses.mix(latents, drawn.noise, drawn.times)
        if not bool(drawn.given.any()):
            return noisy
        given = self.given_frames(latents, batch)
        first = torch.where(drawn.given.view(-1, 1, 1, 1, 1), given, noisy[:, :, :1])
        return torch.cat([first, noisy[:, :, 1:]], dim=2)

    def given_frames(self, latents: Tensor, batch: Batch) -> Tensor:
        """Return latents (B, C, 1, h, w) of the first frames, for samples whose first frame is a model input."""
        return latents[:, :, :1]

    def predict(self, noisy: Tensor, drawn: NoiseDraw, batch: Batch) -> Tensor:
        """Return the transformer's prediction for noisy latents. It has the shape of the latents."""
        raise NotImplementedError

    # Samples

    def pipeline(self, name: str | None = None) -> Any:
        """Build a diffusers pipeline from the children of this module.

        name: class name of the pipeline; None for the pipeline that renders samples.
        """
        import diffusers

        kind = getattr(diffusers, name or self.pipeline_name())
        parts: dict[str, Any] = {name: getattr(self, name, None) for name in self.components()}
        named = [name for name in self.TOKENIZERS if self.folder.class_of(name) is not None]
        taken = inspect.signature(kind.__init__).parameters
        parts |= {name: self._tokenizer(name) for name in named}
        parts = {name: part for name, part in parts.items() if name in taken}
        pipe = kind(**{**parts, "scheduler": self.sampler(), **self.pipeline_settings()})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def pipeline_name(self) -> str:
        """Return the name of the pipeline that renders samples."""
        return self.folder.pipeline

    def components(self) -> tuple[str, ...]:
        """Return the names of all models in the pipeline."""
        names = (*self.DENOISERS, *self.ENCODERS, *self.SAMPLERS)
        return tuple(name for name in names if self.folder.class_of(name) is not None)

    def pipeline_settings(self) -> dict[str, Any]:
        """Return additional arguments for the pipeline's constructor."""
        return {}

    def sampler(self) -> Any:
        """Return a fresh copy of the pipeline's scheduler."""
        return type(self.scheduler).from_config(self.scheduler.config)

    def _tokenizer(self, name: str) -> Any:
        if name not in self.__dict__:
            is_processor = "ImageProcessor" in str(self.folder.class_of(name))
            self.__dict__[name] = self.folder.processor(name) if is_processor else self.folder.tokenizer(name)
        return self.__dict__[name]

    @torch.no_grad()
    def sample(self, batch: Batch) -> Tensor:
        """Render a uint8 video of the bucket's size for each text in a batch. Return videos (B, 3, T, H, W)."""
        made = {name: self._encoder(name).to(self.device) for name in self.components() if not hasattr(self, name)}
        for name, module in made.items():
            setattr(self, name, module)
        try:
            pipe = self.pipeline()
            negative = self.negative_arguments()
            with ExitStack() as stack:
                for name in self.components():
                    stack.callback(cast_inputs(getattr(self, name)).remove)
                rows = [self._render(pipe, batch, row, negative) for row in range(len(batch.text))]
        finally:
            for name in made:
                delattr(self, name)
        return torch.cat(rows)

    def _render(self, pipe: Any, batch: Batch, row: int, negative: dict[str, Any]) -> Tensor:
        size = batch.bucket
        self.prepare(pipe, batch, row)
        # Pipelines keep latents in the dtype of the texts, and the VAE decodes them without a cast.
        texts = {
            name: one.to(self.vae.dtype) if one.is_floating_point() else one
            for name, one in {**self.text_arguments(batch, row), **negative}.items()
        }
        settings = {
            "height": size.height,
            "width": size.width,
            "num_frames": size.num_frames,
            "num_inference_steps": self.config.sample_steps,
            "output_type": "pt",
            **self.sample_arguments(batch, row),
        }
        # Some pipelines take the size from their image or control video.
        taken = inspect.signature(type(pipe).__call__).parameters
        settings = {name: value for name, value in settings.items() if name in taken}
        video = pipe(**texts, **settings, generator=torch.Generator().manual_seed(batch.sample_seeds[row])).frames
        _log.info("rendered sample %d of %d in bucket %s", row + 1, len(batch.text), size.id)
        pixels: Tensor = video.float().transpose(1, 2) * 255
        return pixels.round().clamp(0, 255).to(torch.uint8)

    def prepare(self, pipe: Any, batch: Batch, row: int) -> None:
        """Pass outputs of `encode` to the pipeline in place of the values that it would compute from pixels.

        This is necessary because stored samples do not contain the pixels of their conditioning inputs.
        """

    def text_arguments(self, batch: Batch, row: int) -> dict[str, Tensor]:
        """Return the pipeline's arguments for the text of one sample."""
        return self.prompt_arguments(
            {name: batch[name][row : row + 1] for name in self.TEXT_OUTPUTS if name is not None}
        )

    def negative_arguments(self) -> dict[str, Tensor]:
        """Return the pipeline's arguments for the empty text, from which guidance moves away."""
        return self.prompt_arguments({f"negative_{name}": rows for name, rows in self.encode_text([""]).items()})

    def prompt_arguments(self, texts: dict[str, Any]) -> dict[str, Tensor]:
        """Return the pipeline's arguments for encoded texts.

        texts: maps names to tensors (1, …).
        """
        return texts

    def sample_arguments(self, batch: Batch, row: int) -> dict[str, Any]:
        """Return the pipeline's additional arguments for one sample."""
        return {"guidance_scale": self.config.guidance}

    # Sizes and first frames

    def first_frames(self, batch: Batch, video: Tensor) -> Tensor:
        """Return the first frames of the clips or of the input `config.image`, with shape (B, 3, 1, H, W)."""
        if self.config.image is None:
            return video[:, :, :1]
        if self.config.image not in getattr(batch, "media", {}):
            raise ConfigError(
                f"image is {self.config.image!r}, but the batch has no such conditioning input; add it to "
                f"data.loader: {{media: [{self.config.image}]}}, or set image to null"
            )
        return channels_first(batch, batch.normalized(torch.float32, medium=self.config.image))[:, :, :1]

    def size_factors(self) -> tuple[int, int]:
        """Return the number of frames per latent frame, and the number of pixels per side of a token."""
        raise NotImplementedError

    def check_size(self, size: tuple[int, int, int], bucket: str) -> None:
        """Raise ConfigError if a video of this size (T, H, W) cannot be encoded without cropping."""
        temporal, spatial = self.size_factors()
        if (size[0] - 1) % temporal or size[1] % spatial or size[2] % spatial:
            raise ConfigError(
                f"bucket {bucket} has shape {size}, but this model needs {temporal}·k + 1 frames and sides that are "
                f"multiples of {spatial}; shard the dataset with a preset for this model (`streamvid presets`)"
            )


def cast_inputs(module: Any) -> RemovableHandle:
    """Cast a model's floating-point inputs, except for times, to the model's dtype.

    Inputs are cast until the returned hook is removed.
    """

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(module.dtype) if is_float else value

    def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(cast, args)), {
            name: one if name.endswith(("timestep", "sigma")) else cast(one) for name, one in named.items()
        }

    handle: RemovableHandle = module.register_forward_pre_hook(hook, with_kwargs=True)
    return handle


def as_pixels(frames: Tensor) -> Tensor:
    """Convert first frames (B, 3, 1, H, W) with values in -1..1 to uint8 (B, 3, H, W)."""
    return ((frames[:, :, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def as_image(pixels: Tensor) -> Any:
    """Convert uint8 pixels (3, H, W) to a Pillow image."""
    from PIL import Image

    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def blank_images(batch: Batch, count: int) -> list[Any]:
    """Return `count` black images with the size of a batch's bucket."""
    from PIL import Image

    return [Image.new("RGB", (batch.bucket.width, batch.bucket.height))] * count


def pad_text(states: Tensor, length: int) -> Tensor:
    """Pad text states (B, L, D) with zeros to (B, length, D)."""
    return nn.functional.pad(states, (0, 0, 0, length - states.shape[1]))
