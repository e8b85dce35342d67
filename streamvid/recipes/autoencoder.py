"""A small causal autoencoder of video, home-made: 8 times less height and width, 4 times less frames after the first.

    (B, 3, 4k+1, H, W) ─ cells of 4x4 ─► width/4 ─► /8, every 2nd frame ─► every 4th ─► (B, C, k+1, ⌈H/8⌉, ⌈W/8⌉)

Causal: nothing looks at later frames, so the first frame alone has the first latent of its clip, and images are clips
of one frame. The weights that ship with it come from minutes on two cores and the three scenes of the demo corpus
(tools/train_autoencoder.py): 26 dB on other videos of these scenes. They show how latent training goes, and are no
match for a published autoencoder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamvid.errors import ConfigError
from streamvid.recipes.codec import Size, fill_up, patchify, unpatchify

SHIPPED = Path(__file__).with_name("autoencoder.safetensors")
CELL = (1, 4, 4)


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """Widths at a quarter and an eighth of the picture's size, and channels of a latent."""

    outer_width: int = 48
    inner_width: int = 64
    latent_channels: int = 16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: 1 and up")


class CausalConv(nn.Conv3d):
    """A convolution that repeats the first frame in front of it, and sees no later frame than its own."""

    def __init__(self, width_in: int, width_out: int, kernel: Size, stride: Size = (1, 1, 1)) -> None:
        super().__init__(width_in, width_out, kernel, stride, padding=(0, kernel[1] // 2, kernel[2] // 2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T, H, W) → (B, C', ⌈T/stride⌉, …); output i sees frames up to i·stride."""
        before = x[:, :, :1].expand(-1, -1, self.kernel_size[0] - 1, -1, -1)
        return super().forward(torch.cat([before, x], dim=2))


class Residual(nn.Module):
    """Within frames, then between them, added to what came in. Normed place by place: no frame tells of another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, 1, 1, 1))
        self.space = CausalConv(width, width, (1, 3, 3))
        self.time = CausalConv(width, width, (3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T, H, W) → the same shape."""
        normed = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6) * self.scale
        return x + self.time(functional.silu(self.space(functional.silu(normed))))  # type: ignore[no-any-return]


class TwiceTheFrames(nn.Module):
    """T frames → 2T - 1: the first stays one, and each later one becomes two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = CausalConv(width, width, (3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T, H, W) → (B, C, 2T - 1, H, W)."""
        return self.time(x.repeat_interleave(2, dim=2)[:, :, 1:])  # type: ignore[no-any-return]


class TwiceTheSize(nn.Module):
    """(B, C, T, H, W) → (B, C', T, 2H, 2W)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.spread = nn.Conv3d(width_in, 4 * width_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Each place becomes a cell of 2x2."""
        size = (x.shape[2], 2 * x.shape[3], 2 * x.shape[4])
        return unpatchify(self.spread(x).permute(0, 2, 3, 4, 1).flatten(1, 3), size, (1, 2, 2))


class Autoencoder(nn.Module):
    """`encode` and `decode` of any size. Latents have mean 0 and deviation 1 a channel on what it was trained on."""

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
            TwiceTheFrames(inner),
            TwiceTheSize(inner, outer),
            Residual(outer),
            TwiceTheFrames(outer),
            CausalConv(outer, 3 * CELL[1] * CELL[2], (1, 3, 3)),
        )
        self.register_buffer("mean", torch.zeros(channels, 1, 1, 1))
        self.register_buffer("std", torch.ones(channels, 1, 1, 1))

    def latent_shape(self, size: Size) -> tuple[int, int, int, int]:
        """The shape (C, t, h, w) of the latents of a video of (T, H, W)."""
        return latent_shape(self.config.latent_channels, size)

    def encode(self, video: Tensor) -> Tensor:
        """Float (B, 3, T, H, W) in -1..1 → (B, C, t, h, w); T not of 4k+1, H, W not of 8 are filled by repeating."""
        _, t, h, w = self.latent_shape((video.shape[2], video.shape[3], video.shape[4]))
        video = fill_up(video, (4 * t - 3, 8 * h, 8 * w))
        cells = patchify(video, CELL).reshape(video.shape[0], video.shape[2], 2 * h, 2 * w, -1).permute(0, 4, 1, 2, 3)
        return (self.encoder(cells) - self.mean) / self.std  # type: ignore[no-any-return]

    def decode(self, latents: Tensor, size: Size) -> Tensor:
        """(B, C, t, h, w) → (B, 3, T, H, W) of `size` (T, H, W), about -1..1."""
        _, _, t, h, w = latents.shape
        cells = self.decoder(latents * self.std + self.mean).permute(0, 2, 3, 4, 1).flatten(1, 3)
        return unpatchify(cells, (4 * t - 3, 8 * h, 8 * w), CELL)[:, :, : size[0], : size[1], : size[2]]


def latent_shape(channels: int, size: Size) -> tuple[int, int, int, int]:
    """The shape (C, t, h, w) of the latents of a video of (T, H, W)."""
    return (channels, (size[0] + 2) // 4 + 1, -(-size[1] // 8), -(-size[2] // 8))


def save_autoencoder(model: Autoencoder, path: Path, facts: dict[str, str]) -> None:
    """Weights in half precision, the config and `facts` in the metadata."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().half().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, {"config": json.dumps(asdict(model.config)), **facts})


def autoencoder_config(path: Path | None = None) -> AutoencoderConfig:
    """The config in a file that `save_autoencoder` wrote, the shipped one by default. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    source = path or SHIPPED
    try:
        with safe_open(source, "pt") as file:
            return AutoencoderConfig(**json.loads((file.metadata() or {})["config"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"autoencoder is {str(source)!r}: {error}; give a file that tools/train_autoencoder.py wrote, or null"
        ) from None


def load_autoencoder(path: Path | None = None) -> Autoencoder:
    """The autoencoder of a file that `save_autoencoder` wrote, the shipped one by default; frozen, float32.

    Raises ConfigError for a file that is none.
    """
    from safetensors.torch import load_file

    model = Autoencoder(autoencoder_config(path))
    try:
        model.load_state_dict(load_file(path or SHIPPED))
    except RuntimeError as error:
        raise ConfigError(f"autoencoder is {str(path)!r}, whose weights do not fit its config: {error}") from None
    return model.eval().requires_grad_(False)
