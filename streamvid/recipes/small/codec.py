"""Conversion between videos and latents by space-time patches, exact and invertible for any size, dtype and bucket.

    (B, C, T, H, W)  ── patchify ──►  (B, N, C·pt·ph·pw)  ── unpatchify ──►  (B, C, T, H, W)
                                       N = ⌈T/pt⌉ · ⌈H/ph⌉ · ⌈W/pw⌉, in order t, h, w

B is batch, C channel, T frames, H height, W width. A size that is not a multiple of the patch is padded by repeating
the last frame, row or column; `unpatchify` removes the padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

Size = tuple[int, int, int]


def grid_size(size: Size, patch: Size) -> Size:
    """Return the number of patches (t, h, w) that cover a video of size (T, H, W)."""
    return (-(-size[0] // patch[0]), -(-size[1] // patch[1]), -(-size[2] // patch[2]))


def fill_up(video: Tensor, size: Size) -> Tensor:
    """Pad a video (B, C, T, H, W) to `size` by repeating its last frame, row and column."""
    for dim, length in enumerate(size, start=2):
        if length > video.shape[dim]:
            places = torch.arange(length, device=video.device).clamp(max=video.shape[dim] - 1)
            video = video.index_select(dim, places)
    return video


def patchify(video: Tensor, patch: Size) -> Tensor:
    """Cut a video (B, C, T, H, W) of any dtype into patches (B, N, C·pt·ph·pw)."""
    pt, ph, pw = patch
    t, h, w = grid_size((video.shape[2], video.shape[3], video.shape[4]), patch)
    video = fill_up(video, (t * pt, h * ph, w * pw))
    cells = video.reshape(video.shape[0], video.shape[1], t, pt, h, ph, w, pw)
    return cells.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(video.shape[0], t * h * w, -1)


def unpatchify(tokens: Tensor, size: Size, patch: Size) -> Tensor:
    """Join patches (B, N, C·pt·ph·pw) into a video (B, C, T, H, W) of `size` (T, H, W). This inverts `patchify`."""
    t, h, w = grid_size(size, patch)
    pt, ph, pw = patch
    cells = tokens.reshape(tokens.shape[0], t, h, w, -1, pt, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7)
    video = cells.reshape(cells.shape[0], cells.shape[1], t * pt, h * ph, w * pw)
    return video[:, :, : size[0], : size[1], : size[2]]


class PatchCodec(nn.Module):
    """Lossless codec without weights. The channels of a latent are the pixels of one patch."""

    def __init__(self, patch: Size, channels: int = 3) -> None:
        super().__init__()
        self.patch = patch
        self.channels = channels

    def latent_shape(self, size: Size) -> tuple[int, int, int, int]:
        """Return the latent shape (C, t, h, w) for a video of size (T, H, W)."""
        return (self.channels * math.prod(self.patch), *grid_size(size, self.patch))

    def encode(self, video: Tensor) -> Tensor:
        """Encode a video (B, C, T, H, W) as latents (B, C·pt·ph·pw, t, h, w)."""
        t, h, w = grid_size((video.shape[2], video.shape[3], video.shape[4]), self.patch)
        return patchify(video, self.patch).reshape(video.shape[0], t, h, w, -1).permute(0, 4, 1, 2, 3)

    def decode(self, latents: Tensor, size: Size) -> Tensor:
        """Decode latents (B, C·pt·ph·pw, t, h, w), without loss, into a video (B, C, T, H, W) of `size` (T, H, W)."""
        return unpatchify(latents.permute(0, 2, 3, 4, 1).flatten(1, 3), size, self.patch)
