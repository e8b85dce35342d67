"""Your training module: what trains, what is frozen, and the loss. Put your own models in the places of these three.

    batch ──► encode (frozen, once) ──► batch.latents, batch.text_states ──► forward ──► a loss a sample

`streamvid train` calls `encode` itself and hands its outputs to `forward` as fields of the batch, whether they were
made in this step (task sft) or once, before training (sft:data_process, then sft:train). B batch, C channel, T frames,
H height, W width; t, h, w of latents; L bytes of text, D width of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamvid.recipes.flow import draw_noise_and_times, rectified_flow_loss, sample_by_euler

SCALE = 8  # pixels a side of one latent


class Autoencoder(nn.Module):
    """Stands in for your VAE: a latent is the mean of 8 x 8 pixels. Any size that 8 divides, as every bucket's."""

    def encode(self, video: Tensor) -> Tensor:
        """(B, 3, T, H, W) in -1..1 ─► (B, 3, T, H/8, W/8)"""
        return functional.avg_pool3d(video, (1, SCALE, SCALE))

    def decode(self, latents: Tensor) -> Tensor:
        return functional.interpolate(latents, scale_factor=(1, SCALE, SCALE), mode="nearest")


class TextEncoder(nn.Module):
    """Stands in for yours: a vector for each byte, drawn at random and frozen."""

    def __init__(self, dim: int, most: int = 256) -> None:
        super().__init__()
        # Drawn by itself: the same whether or not a task has built the transformer before.
        table = torch.randn(256, dim, generator=torch.Generator().manual_seed(0))
        self.most, self.table = most, nn.Embedding.from_pretrained(table)

    def forward(self, texts: list[str]) -> list[Tensor]:
        """Texts ─► a tensor (L, D) each. Lengths may differ: they are padded, with a mask, where they are used."""
        device = self.table.weight.device
        cut = [list(text.encode()[: self.most]) or [0] for text in texts]
        return [self.table(torch.tensor(one, device=device)) for one in cut]


class Block(nn.Module):
    """Attention of all tokens and the text's, then each on its own. Layers have the names that LoRA looks for."""

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
    """What trains: noisy latents, times and text ─► the velocity, shaped as the latents."""

    def __init__(self, dim: int, depth: int, heads: int, channels: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(channels, dim), nn.Linear(dim, channels)
        self.place = nn.Conv3d(dim, dim, 3, padding=1, groups=dim)  # neighbours tell a token where it is
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
    """Named children are the models: `model.paths`, `trainable_models`, `lora_base_model` name them."""

    encoders = ("autoencoder", "text_encoder")  # what `encode` alone uses: sft:train builds none of it

    def __init__(self, task: str, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        if task != "sft:data_process":
            self.dit = Transformer(dim, depth, heads)  # first, so that it begins the same with encoders and without
        if task != "sft:train":
            self.autoencoder = Autoencoder()
            self.text_encoder = TextEncoder(dim).requires_grad_(False)

    def encode(self, batch) -> dict[str, Tensor | list[Tensor]]:
        """What is frozen, without gradients. A list of B tensors may differ in their first size."""
        video = batch.normalized(torch.float32)  # (B, 3, T, H, W) in -1..1
        return {"latents": self.autoencoder.encode(video), "text_states": self.text_encoder(batch.text)}

    def encode_null(self) -> dict[str, Tensor]:
        """What takes the place of the text's tensors where a caption is empty, or dropped."""
        return {"text_states": self.text_encoder([""])[0]}

    def forward(self, batch) -> dict[str, Tensor]:
        """The loss, one a sample. `sample_seeds` make its noise its own, in whatever batch and on whatever rank."""
        latents = batch.latents
        noise, times = draw_noise_and_times(latents.shape[1:], batch.sample_seeds, latents.device)
        return {"loss": rectified_flow_loss(lambda x, t: self._velocity(x, t, batch), latents, noise, times)}

    def sample(self, batch) -> Tensor:
        """Videos of the batch's texts and shape, uint8 (B, 3, T, H, W): for eval.sample_steps."""
        noise, _ = draw_noise_and_times(batch.latents.shape[1:], batch.sample_seeds, batch.latents.device)
        latents = sample_by_euler(lambda x, t: self._velocity(x, t, batch), noise, num_steps=20)
        return ((Autoencoder().decode(latents) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def _velocity(self, x: Tensor, times: Tensor, batch) -> Tensor:
        return self.dit(x, times, batch.text_states, batch.text_states_mask)


def build(task: str = "sft", dim: int = 64, depth: int = 2, heads: int = 4) -> MyTraining:
    """What config.yaml names as `model.factory`: called with `model.args`, and with the task."""
    return MyTraining(task, dim, depth, heads)
