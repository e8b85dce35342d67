"""Tests of the code shared by all diffusion recipes: times, loss weights and latents."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from streamvid.recipes.diffusion.config import DiffusionConfig
from streamvid.recipes.diffusion.latents import normalize
from streamvid.recipes.diffusion.losses import weights_of
from streamvid.recipes.diffusion.times import scheduler_shift, shifted, times_of, uniform_numbers

EVENLY = (torch.arange(20000) + 0.5) / 20000


def config(**settings: object) -> DiffusionConfig:
    return DiffusionConfig(model="unused", **settings)  # type: ignore[arg-type]


def test_random_numbers_depend_only_on_the_seed() -> None:
    """SAMPLE-1: noise and random numbers depend only on the sample's seed, not on its batch."""
    noise, numbers = uniform_numbers((4, 2, 3, 3), [5, 6], torch.device("cpu"))
    alone, own = uniform_numbers((4, 2, 3, 3), [6], torch.device("cpu"))
    assert torch.equal(noise[1:], alone) and torch.equal(numbers[1:], own)
    assert not torch.equal(noise[0], noise[1])


def test_logit_normal_times_are_distributed_as_in_diffusers() -> None:
    settings = {"logit_mean": 0.3, "logit_std": 1.4}
    ours = times_of(EVENLY, config(time_sampling="logit-normal", **settings), 1.0)
    theirs = compute_density_for_timestep_sampling(
        "logit_normal", 200_000, **settings, generator=torch.Generator().manual_seed(1)
    )
    levels = torch.linspace(0.02, 0.98, 25)
    assert torch.allclose(torch.quantile(ours, levels), torch.quantile(theirs.float(), levels), atol=0.01)


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
def test_an_expert_gets_its_part_of_the_distribution(sampling: str) -> None:
    """The two parts together form the whole distribution, in the right proportion."""
    whole = times_of(EVENLY, config(time_sampling=sampling), 3.0)
    share = float((whole >= 0.875).float().mean())
    for interval, inside, fraction in (
        ((0.875, 1.0), whole[whole >= 0.875], share),
        ((0.0, 0.875), whole[whole < 0.875], 1 - share),
    ):
        part = times_of(EVENLY, config(time_sampling=sampling), 3.0, interval)
        assert float(part.min()) >= interval[0] - 1e-5 and float(part.max()) <= interval[1]
        levels = torch.linspace(0.05, 0.95, 19)
        assert torch.allclose(torch.quantile(part, levels), torch.quantile(inside, levels), atol=2e-3)
        assert 0.05 < fraction < 0.95


@pytest.mark.parametrize("num_tokens", [300, 2048, 9000])
def test_the_shift_by_tokens_is_that_of_the_pipeline(num_tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096
    )
    times = torch.tensor([0.1, 0.5, 0.9])
    official = scheduler.time_shift(calculate_shift(num_tokens, 1024, 4096, 0.95, 2.05), 1.0, times)
    assert torch.allclose(shifted(times, scheduler_shift(scheduler.config, num_tokens)), official, rtol=1e-5)
    assert scheduler_shift({"shift": 7.0}, num_tokens) == 7.0
    assert scheduler_shift({"flow_shift": 3.0}, num_tokens) == 3.0
    assert scheduler_shift({}, num_tokens) == 1.0


def test_loss_weights_match_their_sources() -> None:
    sigmas = shifted(torch.linspace(1, 0, 1001)[:-1], 5.0)
    bell = torch.exp(-2 * ((sigmas * 1000 - 500) / 1000) ** 2)
    bell = bell - bell.min()
    assert torch.allclose(weights_of(sigmas, "bell", 5.0), bell * (1000 / bell.sum()), atol=1e-4)
    assert math.isclose(float(weights_of(sigmas, "bell", 5.0).mean()), 1.0, rel_tol=1e-4)
    for ours, theirs in (("cosmap", "cosmap"), ("sigma-sqrt", "sigma_sqrt"), ("none", "none")):
        assert torch.allclose(weights_of(sigmas, ours), compute_loss_weighting_for_sd3(theirs, sigmas))  # type: ignore[arg-type]


def test_latents_are_normalized_by_the_configuration() -> None:
    vae = AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    latents = torch.randn(2, 16, 2, 3, 3)
    mean = torch.tensor(vae.config.latents_mean).view(1, 16, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, 16, 1, 1, 1)
    assert torch.allclose(normalize(vae, latents), (latents - mean) / std)
