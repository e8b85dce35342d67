"""A tiny Wan transformer, and its output for fixed inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    texts = {"text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "rope_max_seq_len": 32}
    return WanTransformer3DModel(**sizes, **texts, cross_attn_norm=True).eval()


def wan_output(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 4, 2, 8, 8, generator=generator)
    texts = torch.randn(1, 5, 16, generator=generator)
    with torch.no_grad():
        found: Tensor = model(latents, torch.tensor([500]), texts, return_dict=False)[0]
    return found
