"""A small video transformer for rectified flow: patches in, velocity out, for any bucket's shape.

                                 ┌──────────────────── × gain ───────────────────┐
    video (B,C,T,H,W) ─ patchify ┴ linear ─ + sin/cos (t,h,w) ─► block × depth ─► linear ─ + ─ unpatchify ─► velocity
    time (B,) ─ sin/cos ─ MLP ─┐                                    ▲
    caption ─ bytes ─ pooled ──┴─► condition (B,dim) ── adaLN-zero ─┘

At the start every block is the identity and the velocity is zero, so the first loss is that of predicting nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamvid.trainer.codec import grid_size, patchify, unpatchify
from streamvid.trainer.config import ModelConfig

PAD_BYTE = 256
TIME_FREQUENCIES = 128


def build_model(config: ModelConfig, seed: int) -> VideoTransformer:
    """A freshly initialised model on the CPU: the same weights for the same seed; global randomness is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VideoTransformer(config)


def wave_features(position: Tensor, num_frequencies: int, longest: float = 10_000.0) -> Tensor:
    """(…,) → (…, 2·num_frequencies) float32: cosines and sines of falling frequency."""
    exponent = torch.arange(num_frequencies, device=position.device, dtype=torch.float32) / num_frequencies
    angle = position.float()[..., None] * torch.exp(-math.log(longest) * exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def grid_embedding(grid: tuple[int, int, int], dim: int, device: torch.device) -> Tensor:
    """(t, h, w) → (t·h·w, dim) float32: a third of the width an axis, so that a grid of any size has a place."""
    per_axis = dim // 6
    axes = [wave_features(torch.arange(length, device=device), per_axis) for length in grid]
    parts = [axes[0][:, None, None, :], axes[1][None, :, None, :], axes[2][None, None, :, :]]
    joined = torch.cat([part.expand(*grid, -1) for part in parts], dim=-1)
    return functional.pad(joined, (0, dim - joined.shape[-1])).reshape(-1, dim)


class CaptionEncoder(nn.Module):
    """Captions → (B, dim): UTF-8 bytes, looked at five at a time, averaged. Needs no tokenizer."""

    def __init__(self, dim: int, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.bytes = nn.Embedding(PAD_BYTE + 1, dim)
        self.neighbours = nn.Conv1d(dim, dim, kernel_size=5, padding=2)
        self.out = nn.Linear(dim, dim)

    def forward(self, text: Sequence[str]) -> Tensor:
        encoded = [caption.encode("utf-8", "replace")[: self.max_bytes] for caption in text]
        length = max(1, *(len(caption) for caption in encoded))
        rows = [[*caption, *[PAD_BYTE] * (length - len(caption))] for caption in encoded]
        ids = torch.tensor(rows, device=self.bytes.weight.device)
        mask = (ids != PAD_BYTE).unsqueeze(-1)
        # Masked before and after, so that a caption means the same next to a longer one.
        embedded = (self.bytes(ids) * mask).transpose(1, 2)
        hidden = functional.silu(self.neighbours(embedded).transpose(1, 2)) * mask
        pooled: Tensor = self.out(hidden.sum(dim=1) / mask.sum(dim=1).clamp(min=1))
        return pooled


class Block(nn.Module):
    """Attention and MLP, each scaled, shifted and gated by the condition; the gates start at zero."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = _zero(nn.Linear(dim, 6 * dim))

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)[:, None].chunk(6, dim=-1)
        tokens = tokens + gate_a * self._attend(self.norm(tokens) * (1 + scale_a) + shift_a)
        return tokens + gate_m * self.mlp(self.norm(tokens) * (1 + scale_m) + shift_m)  # type: ignore[no-any-return]

    def _attend(self, tokens: Tensor) -> Tensor:
        batch, num_tokens, dim = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, num_tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.project(mixed.transpose(1, 2).reshape(batch, num_tokens, dim))  # type: ignore[no-any-return]


class VideoTransformer(nn.Module):
    """Velocity of the flow at (video, time) given captions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, patch_values = config.dim, config.channels * math.prod(config.patch)
        self.embed = nn.Linear(patch_values, dim)
        self.time = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.caption = CaptionEncoder(dim, config.max_text_bytes)
        self.blocks = nn.ModuleList(Block(dim, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation = _zero(nn.Linear(dim, 2 * dim))
        self.head = _zero(nn.Linear(dim, patch_values))
        # Noise fills every direction of a patch, of which `dim` may be few: it passes by the blocks, by a gain that
        # depends on the time, and the head has only the picture to take out of it.
        self.bypass = _zero(nn.Linear(dim, patch_values))

    def forward(self, video: Tensor, times: Tensor, text: Sequence[str]) -> Tensor:
        """video: float (B, C, T, H, W); times: float (B,) in 0..1; text: B captions → velocity, shaped as the video."""
        size, patch = (video.shape[2], video.shape[3], video.shape[4]), self.config.patch
        patches = patchify(video, patch)
        tokens = self.embed(patches)
        tokens = tokens + grid_embedding(grid_size(size, patch), self.config.dim, video.device).to(tokens.dtype)
        # Times run over 0..1; the waves are made for whole steps, of which a thousand is customary.
        condition = functional.silu(self.time(wave_features(1000 * times, TIME_FREQUENCIES)) + self.caption(text))
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        velocity = self.head(self.norm(tokens) * (1 + scale) + shift) + self.bypass(condition)[:, None] * patches
        return unpatchify(velocity, size, patch)


def _zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
