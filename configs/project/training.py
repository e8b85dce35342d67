"""Your training module: what trains, what is frozen, and the loss. Replace these three models by your own.

    batch ──► encode (frozen, once) ──► batch.latents, batch.text_states ──► forward ──► one loss per sample

`streamvid train` calls `encode` itself and passes its outputs to `forward` as fields of the batch, whether they were
computed in this step (task sft) or once, before training (sft:data_process, then sft:train). B is batch, C channel,
T frames, H height, W width; t, h, w are those of latents; L is bytes of text, D the width of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamvid.recipes.small.flow import draw_noise_and_times, rectified_flow_loss, sample_by_euler

SCALE = 8  # pixels per side of a latent


class Autoencoder(nn.Module):
    """Stand-in for your VAE: a latent is the mean of 8 x 8 pixels. Sizes must be multiples of 8."""

    def encode(self, video: Tensor) -> Tensor:
        """(B, 3, T, H, W) in -1..1 ─► (B, 3, T, H/8, W/8)"""
        return functional.avg_pool3d(video, (1, SCALE, SCALE))

    def decode(self, latents: Tensor) -> Tensor:
        return functional.interpolate(latents, scale_factor=(1, SCALE, SCALE), mode="nearest")


class TextEncoder(nn.Module):
    """Stand-in for yours: a random, frozen vector per byte."""

    def __init__(self, dim: int, most: int = 256) -> None:
        super().__init__()
        # With its own generator: the same whether or not a task has built the transformer before.
        table = torch.randn(256, dim, generator=torch.Generator().manual_seed(0))
        self.most, self.table = most, nn.Embedding.from_pretrained(table)

    def forward(self, texts: list[str]) -> list[Tensor]:
        """Texts ─► one tensor (L, D) each. Lengths may differ: `forward` gets them padded, with a mask."""
        device = self.table.weight.device
        cut = [list(text.encode()[: self.most]) or [0] for text in texts]
        return [self.table(torch.tensor(one, device=device)) for one in cut]


class Block(nn.Module):
    """Attention over all tokens and the text, then an MLP per token. LoRA finds the layers by their usual names."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, tokens: Tensor, text: Tensor, is_seen: Tensor) -> Tensor:
        """(B, N, D), (B, L, D), bool (B, N + L) ─► (B, N, D)"""
        seen = torch.cat([self.norm(tokens), text.to(tokens.dtype)], dim=1)
        q, k, v = (self._split(layer(x)) for layer, x in ((self.q, self.norm(tokens)), (self.k, seen), (self.v, seen)))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=is_seen[:, None, None])
        tokens = tokens + self.o(mixed.transpose(1, 2).flatten(2))
        return tokens + self.ffn(self.norm2(tokens))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """The model that trains: noisy latents, times and text ─► the velocity, in the shape of the latents."""

    def __init__(self, dim: int, depth: int, heads: int, channels: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(channels, dim), nn.Linear(dim, channels)
        self.place = nn.Conv3d(dim, dim, 3, padding=1, groups=dim)  # positions, from a token's neighbours
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        x = self.embed(latents.movedim(1, -1))
        x = x + self.place(x.movedim(-1, 1)).movedim(1, -1) + self.time(times[:, None])[:, None, None, None]
        tokens = x.flatten(1, 3)
        is_seen = torch.cat([text_mask.new_ones(tokens.shape[:2]), text_mask], dim=1)
        for block in self.blocks:
            tokens = block(tokens, text, is_seen)
        return self.head(tokens).unflatten(1, x.shape[1:4]).movedim(-1, 1)


class MyTraining(nn.Module):
    """Its named children are the models, which weights.paths, trainable and lora.base_model refer to."""

    encoders = ("autoencoder", "text_encoder")  # used by `encode` only: sft:train does not build them

    def __init__(self, task: str, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        if task != "sft:data_process":
            # First, so that its initial weights do not depend on the encoders.
            self.dit = Transformer(dim, depth, heads)
        if task != "sft:train":
            self.autoencoder = Autoencoder()
            self.text_encoder = TextEncoder(dim).requires_grad_(False)

    def encode(self, batch) -> dict[str, Tensor | list[Tensor]]:
        """Run the frozen models, without gradients. A list of B tensors may differ in their first size."""
        video = batch.normalized(torch.float32)  # (B, 3, T, H, W) in -1..1
        return {"latents": self.autoencoder.encode(video), "text_states": self.text_encoder(batch.text)}

    def encode_null(self) -> dict[str, Tensor]:
        """Return the tensors of an empty or dropped caption."""
        return {"text_states": self.text_encoder([""])[0]}

    def forward(self, batch) -> dict[str, Tensor]:
        """Return one loss per sample. With `sample_seeds` its noise is the same in any batch and on any rank."""
        latents = batch.latents
        noise, times = draw_noise_and_times(latents.shape[1:], batch.sample_seeds, latents.device)
        return {"loss": rectified_flow_loss(lambda x, t: self._velocity(x, t, batch), latents, noise, times)}

    def sample(self, batch) -> Tensor:
        """Generate videos of the batch's texts and shape, uint8 (B, 3, T, H, W), for eval.sample_steps."""
        noise, _ = draw_noise_and_times(batch.latents.shape[1:], batch.sample_seeds, batch.latents.device)
        latents = sample_by_euler(lambda x, t: self._velocity(x, t, batch), noise, num_steps=20)
        return ((Autoencoder().decode(latents) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def _velocity(self, x: Tensor, times: Tensor, batch) -> Tensor:
        return self.dit(x, times, batch.text_states, batch.text_states_mask)


def build(task: str = "sft", dim: int = 64, depth: int = 2, heads: int = 4) -> MyTraining:
    """Build the module. config.yaml names it as `model.factory`; it gets `model.args` and the task."""
    return MyTraining(task, dim, depth, heads)
