from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from streamvid.recipes.small.text_encoder import pad_states
from streamvid.recipes.small.transformer import TransformerBlock, VideoTransformer, grid_embedding, masked_mean
from tests.recipes.small_batches import wake

CPU = torch.device("cpu")


def small(patch: tuple[int, int, int] = (1, 2, 2)) -> VideoTransformer:
    torch.manual_seed(0)
    return VideoTransformer(dim=32, depth=2, heads=4, channels=3, patch=patch, text_width=16)


def awake(patch: tuple[int, int, int] = (1, 2, 2)) -> VideoTransformer:
    model = small(patch)
    wake(model)
    return model


def states(*lengths: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return pad_states([torch.randn(length, 16, generator=generator) for length in lengths])


@pytest.mark.parametrize("size", [(1, 8, 8), (4, 16, 8), (5, 7, 9), (1, 1, 1), (17, 4, 24)])
@pytest.mark.parametrize("patch", [(1, 1, 1), (2, 4, 4)])
def test_one_model_takes_every_bucket(size: tuple[int, int, int], patch: tuple[int, int, int]) -> None:
    latents = torch.randn(2, 3, *size)
    velocity = awake(patch)(latents, torch.tensor([0.1, 0.9]), *states(5, 1))
    assert velocity.shape == latents.shape
    assert velocity.isfinite().all()


def test_the_initial_model_is_the_identity_with_zero_velocity() -> None:
    model = small()
    text, mask = states(5, 1)
    assert not model(torch.randn(2, 3, 4, 8, 8), torch.rand(2), text, mask).any()
    tokens, condition, read = torch.randn(2, 7, 32), torch.randn(2, 32), torch.randn(2, 5, 32)
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        assert torch.equal(block(tokens, condition, read, mask), tokens)


def test_time_text_and_position_affect_the_output() -> None:
    model, latents, time = awake(), torch.randn(1, 3, 2, 8, 8), torch.tensor([0.5])
    text = states(4)
    velocity = model(latents, time, *text)
    assert not torch.allclose(model(latents, torch.tensor([0.6]), *text), velocity)
    assert not torch.allclose(model(latents, time, *states(4, seed=9)), velocity)
    moved = model(latents.roll(4, dims=4), time, *text).roll(-4, dims=4)
    assert not torch.allclose(moved, velocity, atol=1e-5)


def test_the_text_is_read_token_by_token() -> None:
    """Attention distinguishes two texts with the same mean, which a pooled state could not."""
    model, latents, time = awake(), torch.randn(1, 3, 2, 8, 8), torch.tensor([0.5])
    condition, tokens = torch.randn(1, 32), torch.randn(1, 6, 32)
    apart = torch.tensor([[[3.0] * 16, [-3.0] * 16]]).repeat(1, 1, 2)
    same, mask = torch.zeros(1, 2, 32), torch.ones(1, 2, dtype=torch.bool)
    assert torch.equal(masked_mean(apart, mask), masked_mean(same, mask))
    block = model.blocks[0]
    assert not torch.allclose(block(tokens, condition, apart, mask), block(tokens, condition, same, mask))
    assert model(latents, time, *states(2)).isfinite().all()


def test_samples_of_a_batch_are_independent() -> None:
    model, latents, times = awake(), torch.randn(2, 3, 2, 8, 8), torch.tensor([0.2, 0.7])
    text, mask = states(3, 11)
    together = model(latents, times, text, mask)
    alone = model(latents[:1], times[:1], text[:1, :3], mask[:1, :3])
    assert torch.allclose(together[:1], alone, atol=1e-5)


def test_the_padding_of_a_text_is_ignored() -> None:
    model, latents, times = awake(), torch.randn(2, 3, 2, 8, 8), torch.tensor([0.2, 0.7])
    text, mask = states(3, 11)
    other = torch.where(mask.unsqueeze(-1), text, torch.full_like(text, 7.0))
    assert torch.allclose(model(latents, times, text, mask), model(latents, times, other, mask), atol=1e-6)


def test_a_text_without_states_is_accepted() -> None:
    model, latents = awake(), torch.randn(2, 3, 2, 8, 8)
    text, mask = states(0, 4)
    assert not mask[0].any()
    assert model(latents, torch.rand(2), text, mask).isfinite().all()


def test_every_parameter_gets_a_gradient_and_names_are_those_that_adapters_look_for() -> None:
    model = awake()
    model(torch.randn(2, 3, 2, 8, 8), torch.rand(2), *states(3, 5)).square().mean().backward()
    for name, parameter in model.named_parameters():
        # The softmax is invariant to a shift of all keys, so the gradient of a key bias is zero up to rounding.
        assert parameter.grad is not None and (parameter.grad.any() or name.endswith("k.bias")), name
    linears = {name for name, module in model.blocks[0].named_modules() if isinstance(module, nn.Linear)}
    attention = {f"{which}_attn.{end}" for which in ("self", "cross") for end in "qkvo"}
    assert linears == attention | {"ffn.0", "ffn.2", "modulation"}


@pytest.mark.parametrize("mode", ["autocast", "whole"])
def test_the_model_works_in_half_precision(mode: str) -> None:
    model, latents, times = awake(), torch.randn(2, 3, 2, 8, 8), torch.rand(2)
    text = states(3, 5)
    exact = model(latents, times, *text)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        model = model if mode == "autocast" else model.to(torch.bfloat16)
        half = model(latents, times, *text)
    assert (half.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("dim", [6, 32, 100])
def test_every_position_of_a_grid_has_its_own_embedding(dim: int) -> None:
    places = grid_embedding((3, 4, 5), dim, CPU)
    assert places.shape == (60, dim)
    assert len(torch.unique(places, dim=0)) == 60
