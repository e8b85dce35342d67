"""Small training modules like those of users, which the tests of this folder build by import path."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.dropout = nn.Dropout(dropout)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, *, condition: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x) * (1 + condition))
        return x + self.dropout(self.ffn(self.norm(x)))


class Denoiser(nn.Module):
    def __init__(self, dim: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(64.0)[:, None] / 64, persistent=False)
        self.embed = nn.Linear(12, dim)
        self.time = nn.Linear(1, dim)
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(depth))
        self.head = nn.Linear(dim, 12)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        condition = self.time(times[:, None, None])
        x = self.embed(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x, condition=condition)
        return self.head(x)


class Autoencoder(nn.Module):
    """Convolutions, and a norm whose buffers change in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(3, 8, 3, padding="same", padding_mode="replicate")
        self.norm = nn.BatchNorm3d(8)
        self.second = nn.Conv3d(8, 12, (1, 2, 2), stride=(1, 2, 2))

    def forward(self, video: Tensor) -> Tensor:
        return self.second(functional.silu(self.norm(self.first(video)))).flatten(2).transpose(1, 2)


class Training(nn.Module):
    """A module whose denoiser and refiner train, and whose autoencoder encodes."""

    encoders = ("autoencoder",)

    def __init__(self, dim: int, depth: int, dropout: float, with_encoder: bool) -> None:
        super().__init__()
        self.autoencoder = Autoencoder() if with_encoder else None
        self.dit = Denoiser(dim, depth, dropout)
        self.refiner = nn.Sequential(nn.Linear(12, 16), nn.SiLU(), nn.Linear(16, 12))

    def encode(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.autoencoder is not None
        return {"latents": self.autoencoder(batch["video"])}

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        latents = batch["latents"] if "latents" in batch else self.encode(batch)["latents"].detach()
        predicted = self.refiner(self.dit(latents, batch["times"]))
        return functional.mse_loss(predicted.float(), latents.float().flip(1))


def build(*, dim: int = 16, depth: int = 2, dropout: float = 0.0, task: str = "sft") -> Training:
    # Build the trained part first, so that its weights do not depend on whether the encoder is built.
    state = torch.get_rng_state()
    module = Training(dim, depth, dropout, with_encoder=False)
    if task != "sft:train":
        torch.set_rng_state(state)
        module.autoencoder = Autoencoder()
    return module


def build_with_its_encoder(**arguments: int) -> Training:
    """Build a module whose encoder comes with its weights, as from a package or from_pretrained."""
    module = build(task="sft:train", **arguments)
    with torch.device("cpu"):
        torch.manual_seed(11)
        module.autoencoder = Autoencoder()
    return module


class Pair(nn.Module):
    """A module with two models of the same structure, and one whose layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.tied = Tied()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


def no_module() -> int:
    return 3


THREE = 3


def batch(seed: int = 0, size: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Return latents and times of `size` samples."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "latents": torch.randn(size, length, 12, generator=generator),
        "times": torch.rand(size, generator=generator),
    }


def clip(seed: int = 0, size: int = 2) -> dict[str, Tensor]:
    """Return videos and times of `size` samples."""
    generator = torch.Generator().manual_seed(seed)
    return {"video": torch.randn(size, 3, 2, 4, 4, generator=generator), "times": torch.rand(size, generator=generator)}


def train(module: nn.Module, steps: int = 3) -> list[float]:
    """Run a few optimizer steps on the trainable parameters; return the losses."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        loss = module(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the module's state."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}
