"""Video ↔ tokens by cutting space-time patches: exact, invertible, for any size, dtype and bucket.

    (B, C, T, H, W)  ── patchify ──►  (B, N, C·pt·ph·pw)  ── unpatchify ──►  (B, C, T, H, W)
                                       N = ⌈T/pt⌉ · ⌈H/ph⌉ · ⌈W/pw⌉, in order t, h, w

B batch, C channel, T frames, H height, W width. A size that the patch does not divide is filled up by repeating the
last frame, row or column; `unpatchify` cuts that off again.
"""

from __future__ import annotations

import torch
from torch import Tensor

Size = tuple[int, int, int]


def grid_size(size: Size, patch: Size) -> Size:
    """How many patches (t, h, w) cover a video of (T, H, W)."""
    return (-(-size[0] // patch[0]), -(-size[1] // patch[1]), -(-size[2] // patch[2]))


def patchify(video: Tensor, patch: Size) -> Tensor:
    """(B, C, T, H, W) of any dtype → (B, N, C·pt·ph·pw) of the same."""
    size = (video.shape[2], video.shape[3], video.shape[4])
    t, h, w = grid_size(size, patch)
    for dim, (length, count, step) in enumerate(zip(size, (t, h, w), patch, strict=True), start=2):
        if count * step > length:
            fill = list(video.shape)
            fill[dim] = count * step - length
            video = torch.cat([video, video.narrow(dim, length - 1, 1).expand(fill)], dim=dim)
    pt, ph, pw = patch
    cells = video.reshape(video.shape[0], video.shape[1], t, pt, h, ph, w, pw)
    return cells.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(video.shape[0], t * h * w, -1)


def unpatchify(tokens: Tensor, size: Size, patch: Size) -> Tensor:
    """(B, N, C·pt·ph·pw) → (B, C, T, H, W), the inverse of `patchify` for a video of `size` (T, H, W)."""
    t, h, w = grid_size(size, patch)
    pt, ph, pw = patch
    cells = tokens.reshape(tokens.shape[0], t, h, w, -1, pt, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7)
    video = cells.reshape(cells.shape[0], cells.shape[1], t * pt, h * ph, w * pw)
    return video[:, :, : size[0], : size[1], : size[2]]
