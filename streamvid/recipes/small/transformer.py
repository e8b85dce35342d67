"""Small video transformer for rectified flow: latents in, velocity out, for the shape of any bucket.

                                   ┌──────────────────── × gain ────────────────────┐
    latents (B,C,t,h,w) ─ patchify ┴ linear ─ + sin/cos (t,h,w) ─► block × depth ─► linear ─ + ─ unpatchify ─► velocity
    time (B,) ─ sin/cos ─ MLP ─┐                                    ▲   ▲
                  ┌─ mean ─────┴─► condition (B,dim) ── adaLN-zero ─┘   │
    text (B,L,D) ─┴─ MLP ─► with one learned state in front ──── cross-attention
    audio (B,M,A) ─ MLP ─ mean over the time of each token ─► added to the tokens

Every block starts as the identity, and the velocity starts as zero, so the first loss is the loss of a zero prediction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamvid.recipes.small.codec import Size, grid_size, patchify, unpatchify

TIME_FREQUENCIES = 128


def wave_features(position: Tensor, num_frequencies: int, longest: float = 10_000.0) -> Tensor:
    """Map positions (…,) to float32 features (…, 2·num_frequencies): cosines and sines of decreasing frequency."""
    exponent = torch.arange(num_frequencies, device=position.device, dtype=torch.float32) / num_frequencies
    angle = position.float()[..., None] * torch.exp(-math.log(longest) * exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def grid_embedding(grid: Size, dim: int, device: torch.device) -> Tensor:
    """Embed the positions of a (t, h, w) grid as a float32 tensor (t·h·w, dim). Each axis gets a third of the width."""
    per_axis = dim // 6
    axes = [wave_features(torch.arange(length, device=device), per_axis) for length in grid]
    parts = [axes[0][:, None, None, :], axes[1][None, :, None, :], axes[2][None, None, :, :]]
    joined = torch.cat([part.expand(*grid, -1) for part in parts], dim=-1)
    return functional.pad(joined, (0, dim - joined.shape[-1])).reshape(-1, dim)


class Attention(nn.Module):
    """Attention from tokens to `context`, which is either the tokens themselves or the text."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from tokens (B, N, dim) to context (B, L, dim). Return (B, N, dim).

        mask: bool (B, L), False for padding.
        """
        q, k, v = (
            linear(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, source in ((self.q, tokens), (self.k, context), (self.v, context))
        )
        seen = None if mask is None else mask[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Transformer block with self-attention, cross-attention to the text, and an MLP.

    The condition scales, shifts and gates each of these layers. The gates start at zero.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.self_attn = Attention(dim, heads)
        self.cross_attn = Attention(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = _zero(nn.Linear(dim, 9 * dim))

    def forward(self, tokens: Tensor, condition: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """Map tokens (B, N, dim) to (B, N, dim), given a condition (B, dim), text (B, L, dim) and a mask (B, L)."""
        own, cross, ffn = self.modulation(condition)[:, None].chunk(3, dim=-1)
        normed, gate = self._modulated(tokens, own)
        tokens = tokens + gate * self.self_attn(normed, normed)
        normed, gate = self._modulated(tokens, cross)
        tokens = tokens + gate * self.cross_attn(normed, text, mask)
        normed, gate = self._modulated(tokens, ffn)
        return tokens + gate * self.ffn(normed)  # type: ignore[no-any-return]

    def _modulated(self, tokens: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate = modulation.chunk(3, dim=-1)
        return self.norm(tokens) * (1 + scale) + shift, gate


class VideoTransformer(nn.Module):
    """Model that predicts the flow's velocity from latents, times, text states and, optionally, audio."""

    def __init__(
        self, *, dim: int, depth: int, heads: int, channels: int, patch: Size, text_width: int, audio_width: int = 0
    ) -> None:
        """Build the model.

        channels: number of latent channels.
        patch: number of latents (t, h, w) per token.
        text_width: width of a text state.
        audio_width: width of an audio state; 0 builds a model without audio.
        """
        super().__init__()
        self.dim = dim
        self.patch = patch
        patch_values = channels * math.prod(patch)
        self.embed = nn.Linear(patch_values, dim)
        self.time = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.text = nn.Sequential(
            nn.LayerNorm(text_width), nn.Linear(text_width, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        # A state that is never masked, because attention without any visible state would be NaN.
        self.always = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation = _zero(nn.Linear(dim, 2 * dim))
        self.head = _zero(nn.Linear(dim, patch_values))
        # Noise fills every direction of a patch, which may have more values than `dim`. It bypasses the blocks with a
        # gain that depends on the time, so that the head only has to remove the picture.
        self.bypass = _zero(nn.Linear(dim, patch_values))
        # Last, so that all other parts have the same initial weights as without audio.
        self.audio = (
            nn.Sequential(nn.Linear(audio_width, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim))
            if audio_width
            else None
        )

    def forward(
        self, latents: Tensor, times: Tensor, text: Tensor, mask: Tensor, audio: Tensor | None = None
    ) -> Tensor:
        """Return the velocity, which has the shape of the latents.

        latents: float (B, C, t, h, w).
        times: float (B,) in 0..1.
        text: text states (B, L, D).
        mask: bool (B, L), False for padding.
        audio: audio states (B, M, A), evenly spaced over the duration of the latents; required by a model with audio.
        """
        size, dtype = (latents.shape[2], latents.shape[3], latents.shape[4]), self.always.dtype
        patches = patchify(latents, self.patch).to(dtype)
        tokens = self.embed(patches)
        grid = grid_size(size, self.patch)
        tokens = tokens + grid_embedding(grid, self.dim, latents.device).to(tokens.dtype)
        if self.audio is not None:
            assert audio is not None
            of_frames = mean_over_time(self.audio(audio.to(dtype)), grid[0])
            tokens = tokens + of_frames.repeat_interleave(grid[1] * grid[2], dim=1)
        states = self.text(text.to(dtype))
        # Times are in 0..1, but the waves are designed for integer steps, usually a thousand.
        time = self.time(wave_features(1000 * times, TIME_FREQUENCIES).to(dtype))
        condition = functional.silu(time + masked_mean(states, mask))
        states = torch.cat([self.always.to(states.dtype).expand(len(states), -1, -1), states], dim=1)
        mask = functional.pad(mask, (1, 0), value=True)
        for block in self.blocks:
            tokens = block(tokens, condition, states, mask)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        velocity = self.head(self.norm(tokens) * (1 + scale) + shift) + self.bypass(condition)[:, None] * patches
        return unpatchify(velocity, size, self.patch)


def masked_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Average the states (B, L, dim) that are not padding. Return (B, dim), or zeros if all are padding."""
    counted = mask.unsqueeze(-1).to(states.dtype)
    return (states * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def mean_over_time(states: Tensor, length: int) -> Tensor:
    """Divide the duration of states (B, M, dim) into `length` equal parts.

    Return the mean of each part, with shape (B, length, dim).
    """
    return functional.adaptive_avg_pool1d(states.transpose(1, 2), length).transpose(1, 2)


def _zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
