from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamvid.recipes.small.flow import draw_noise_and_times, guided, rectified_flow_loss, sample_by_euler, shifted

SHAPE = (3, 2, 4, 4)


@settings(deadline=None)
@given(seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5), place=st.integers(0, 4))
def test_a_sample_draws_the_same_whatever_batch_it_is_in(seeds: list[int], place: int) -> None:
    noise, times = draw_noise_and_times(SHAPE, seeds, "cpu")
    row = place % len(seeds)
    alone, time = draw_noise_and_times(SHAPE, [seeds[row]], "cpu")
    assert torch.equal(noise[row], alone[0])
    assert torch.equal(times[row], time[0])


def test_draws_depend_only_on_the_seed_and_do_not_affect_global_randomness() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    noise, times = draw_noise_and_times(SHAPE, [0, 1, 2, 2**63 - 1], "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(times.tolist())) == 4
    assert len(torch.unique(noise.flatten(1), dim=0)) == 4
    assert noise.dtype == times.dtype == torch.float32


def test_times_are_logit_normal_and_noise_is_normal() -> None:
    noise, times = draw_noise_and_times((4, 1, 1, 1), range(20_000), "cpu")
    assert times.min() > 0 and times.max() < 1
    logits = torch.logit(times)
    assert abs(logits.mean()) < 0.03
    assert abs(logits.std() - 1) < 0.03
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    # Times and noise of a sample are independent.
    assert abs((logits * noise[:, 0, 0, 0, 0]).mean()) < 0.03


@given(shift=st.floats(1, 12), time=st.floats(0, 1))
def test_a_shift_moves_times_towards_the_noise_and_keeps_both_ends(shift: float, time: float) -> None:
    ends = shifted(torch.tensor([0.0, 1.0]), shift)
    assert torch.allclose(ends, torch.tensor([0.0, 1.0]))
    at = torch.tensor(time, dtype=torch.float64)
    assert at - 1e-9 <= shifted(at, shift) <= 1 + 1e-9
    assert torch.equal(shifted(at, 1.0), at)


def test_shifted_draws_equal_shifted_plain_draws() -> None:
    seeds = range(8)
    plain, moved = draw_noise_and_times(SHAPE, seeds, "cpu"), draw_noise_and_times(SHAPE, seeds, "cpu", 3.0)
    assert torch.equal(plain[0], moved[0])
    assert torch.equal(shifted(plain[1], 3.0), moved[1])


def test_the_loss_is_per_sample_and_zero_for_the_true_velocity() -> None:
    latents = torch.rand(3, *SHAPE) * 2 - 1
    noise, times = draw_noise_and_times(SHAPE, [1, 2, 3], "cpu")

    def knows(mixed: Tensor, at: Tensor) -> Tensor:
        t = at[:, None, None, None, None]
        assert torch.allclose(mixed, latents + t * (noise - latents), atol=1e-6)
        return noise - latents

    assert rectified_flow_loss(knows, latents, noise, times).tolist() == [0.0] * 3
    blank = rectified_flow_loss(lambda v, t: torch.zeros_like(v), latents, noise, times)
    assert torch.allclose(blank, (noise - latents).square().mean(dim=(1, 2, 3, 4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_float32_for_latents_and_models_of_half_precision(dtype: torch.dtype) -> None:
    latents = torch.randn(2, *SHAPE).to(dtype)
    noise, times = draw_noise_and_times(SHAPE, [1, 2], "cpu")
    loss = rectified_flow_loss(lambda v, t: (noise - latents.float()).to(dtype), latents, noise, times)
    assert loss.dtype == torch.float32
    assert loss.max() < 1e-4


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_is_exact_on_straight_paths_for_any_number_of_steps(shift: float) -> None:
    target = torch.rand(2, *SHAPE) * 2 - 1
    noise, _ = draw_noise_and_times(SHAPE, [1, 2], "cpu")
    for num_steps in (1, 7):
        found = sample_by_euler(lambda x, t: noise - target, noise, num_steps, shift)
        assert torch.allclose(found, target, atol=1e-5)


def test_euler_is_more_accurate_on_curved_paths_with_more_steps() -> None:
    """For dx/dt = x from t = 1 down to 0, the exact solution is x_0 = noise / e."""
    noise, _ = draw_noise_and_times(SHAPE, [1], "cpu")
    errors = [(sample_by_euler(lambda x, t: x, noise, n) - noise / torch.e).abs().max() for n in (1, 10, 100)]
    assert errors[0] > 5 * errors[1] > 25 * errors[2] > 0


def test_guidance_interpolates_between_no_text_and_text_and_extrapolates() -> None:
    with_text, without = torch.full((1,), 3.0), torch.full((1,), 1.0)
    assert [guided(with_text, without, scale).item() for scale in (0.0, 1.0, 2.0)] == [1.0, 3.0, 5.0]
