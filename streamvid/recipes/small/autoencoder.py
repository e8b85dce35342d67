"""Small causal video autoencoder: divides height and width by 8, and the number of frames after the first by 4.

    (B, 3, 4k+1, H, W) ─ cells of 4x4 ─► width/4 ─► /8, every 2nd frame ─► every 4th ─► (B, C, k+1, ⌈H/8⌉, ⌈W/8⌉)

It is causal: no output depends on later frames. The first latent of a clip depends on the first frame alone, so an
image is a clip of one frame. The shipped weights were trained for a few minutes on two cores with the three scenes of
the demo corpus (tools/train_autoencoder.py), and reach a PSNR of 26 dB on other videos of these scenes. They are for
demonstrating training on latents and do not replace a published autoencoder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from streamvid.config import Options, option
from streamvid.errors import ConfigError
from streamvid.recipes.small.codec import Size, fill_up, patchify, unpatchify

SHIPPED = Path(__file__).with_name("autoencoder.safetensors")
CELL = (1, 4, 4)


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(Options):
    """Configuration of the autoencoder."""

    outer_width: int = option(48, minimum=1, help="Number of channels at a quarter of the frame size.")
    inner_width: int = option(64, minimum=1, help="Number of channels at an eighth of the frame size.")
    latent_channels: int = option(16, minimum=1, help="Number of latent channels.")


class CausalConv(nn.Conv3d):
    """Convolution that repeats the first frame before the clip, so that no output depends on later frames."""

    def __init__(self, width_in: int, width_out: int, kernel: Size, stride: Size = (1, 1, 1)) -> None:
        super().__init__(width_in, width_out, kernel, stride, padding=(0, kernel[1] // 2, kernel[2] // 2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, T, H, W) to (B, C', ⌈T/stride⌉, …). Output i depends on frames up to i·stride."""
        before = x[:, :, :1].expand(-1, -1, self.kernel_size[0] - 1, -1, -1)
        return super().forward(torch.cat([before, x], dim=2))


class Residual(nn.Module):
    """Residual block: a spatial convolution, then a causal temporal convolution.

    Each position is normalized separately, so that normalization does not mix frames.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, 1, 1, 1))
        self.space = CausalConv(width, width, (1, 3, 3))
        self.time = CausalConv(width, width, (3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to a tensor (B, C, T, H, W). The shape does not change."""
        normed = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6) * self.scale
        return x + self.time(functional.silu(self.space(functional.silu(normed))))  # type: ignore[no-any-return]


class UpsampleTime(nn.Module):
    """Layer that upsamples T frames to 2T - 1: each frame except the first becomes two frames."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = CausalConv(width, width, (3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, T, H, W) to (B, C, 2T - 1, H, W)."""
        return self.time(x.repeat_interleave(2, dim=2)[:, :, 1:])  # type: ignore[no-any-return]


class UpsampleSpace(nn.Module):
    """Layer that upsamples height and width by 2."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.spread = nn.Conv3d(width_in, 4 * width_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, T, H, W) to (B, C', T, 2H, 2W)."""
        size = (x.shape[2], 2 * x.shape[3], 2 * x.shape[4])
        return unpatchify(self.spread(x).permute(0, 2, 3, 4, 1).flatten(1, 3), size, (1, 2, 2))


class Autoencoder(nn.Module):
    """Autoencoder for any video size. On its training data, latent channels have mean 0 and standard deviation 1."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        outer, inner, channels = config.outer_width, config.inner_width, config.latent_channels
        self.encoder = nn.Sequential(
            CausalConv(3 * CELL[1] * CELL[2], outer, (1, 3, 3)),
            Residual(outer),
            CausalConv(outer, inner, (1, 3, 3), stride=(1, 2, 2)),
            CausalConv(inner, inner, (3, 1, 1), stride=(2, 1, 1)),
            Residual(inner),
            CausalConv(inner, inner, (3, 1, 1), stride=(2, 1, 1)),
            nn.Conv3d(inner, channels, 1),
        )
        self.decoder = nn.Sequential(
            CausalConv(channels, inner, (1, 3, 3)),
            Residual(inner),
            UpsampleTime(inner),
            UpsampleSpace(inner, outer),
            Residual(outer),
            UpsampleTime(outer),
            CausalConv(outer, 3 * CELL[1] * CELL[2], (1, 3, 3)),
        )
        self.register_buffer("mean", torch.zeros(channels, 1, 1, 1))
        self.register_buffer("std", torch.ones(channels, 1, 1, 1))

    def latent_shape(self, size: Size) -> tuple[int, int, int, int]:
        """Return the latent shape (C, t, h, w) for a video of size (T, H, W)."""
        return (self.config.latent_channels, (size[0] + 2) // 4 + 1, -(-size[1] // 8), -(-size[2] // 8))

    def encode(self, video: Tensor) -> Tensor:
        """Encode a video (B, 3, T, H, W) with values in -1..1 as latents (B, C, t, h, w).

        Pads T to 4k+1, and H and W to multiples of 8.
        """
        _, t, h, w = self.latent_shape((video.shape[2], video.shape[3], video.shape[4]))
        video = fill_up(video, (4 * t - 3, 8 * h, 8 * w))
        cells = patchify(video, CELL).reshape(video.shape[0], video.shape[2], 2 * h, 2 * w, -1).permute(0, 4, 1, 2, 3)
        return (self.encoder(cells) - self.mean) / self.std  # type: ignore[no-any-return]

    def decode(self, latents: Tensor, size: Size) -> Tensor:
        """Decode latents (B, C, t, h, w) to a video (B, 3, T, H, W) of `size` (T, H, W).

        The values range from about -1 to 1.
        """
        _, _, t, h, w = latents.shape
        cells = self.decoder(latents * self.std + self.mean).permute(0, 2, 3, 4, 1).flatten(1, 3)
        return unpatchify(cells, (4 * t - 3, 8 * h, 8 * w), CELL)[:, :, : size[0], : size[1], : size[2]]


def save_autoencoder(model: Autoencoder, path: Path, facts: dict[str, str]) -> None:
    """Save the weights in half precision, with the configuration and `facts` as metadata."""
    tensors = {name: tensor.detach().half().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, {"config": json.dumps(asdict(model.config)), **facts})


def load_autoencoder(path: Path | None = None) -> Autoencoder:
    """Load a frozen float32 autoencoder from a file written by `save_autoencoder`, by default the shipped file.

    No random numbers are drawn. Raises ConfigError if the file is missing or has an unsupported format.
    """
    source = path or SHIPPED
    try:
        with safe_open(source, "pt") as file, torch.device("meta"):
            model = Autoencoder(AutoencoderConfig(**json.loads((file.metadata() or {})["config"])))
        model.load_state_dict({name: one.float() for name, one in load_file(source).items()}, assign=True)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"its metadata has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"cannot load autoencoder {str(source)!r}: {reason}; use a file written by tools/train_autoencoder.py, or "
            "specify null to use the shipped weights"
        ) from None
    return model.eval().requires_grad_(False)
