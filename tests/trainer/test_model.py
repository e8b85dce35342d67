from __future__ import annotations

import pytest
import torch

from streamvid.trainer.config import ModelConfig
from streamvid.trainer.flow import draw_noise_and_times, rectified_flow_loss, seeded_generator
from streamvid.trainer.model import Block, VideoTransformer, build_model, grid_embedding

SMALL = ModelConfig(dim=32, depth=2, heads=4, patch=(2, 4, 4))
CPU = torch.device("cpu")


def awake(config: ModelConfig = SMALL) -> VideoTransformer:
    """A model whose zeros are gone, so that everything in it has a say."""
    model = build_model(config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize("size", [(1, 8, 8), (4, 16, 8), (5, 7, 9), (1, 1, 1), (17, 4, 24)])
def test_one_model_takes_every_bucket(size: tuple[int, int, int]) -> None:
    video = torch.randn(2, 3, *size)
    velocity = awake()(video, torch.tensor([0.1, 0.9]), ["a", ""])
    assert velocity.shape == video.shape
    assert velocity.isfinite().all()


def test_it_starts_as_the_identity_with_no_velocity() -> None:
    model = build_model(SMALL, 0)
    assert not model(torch.randn(2, 3, 4, 8, 8), torch.rand(2), ["a", "b"]).any()
    tokens, condition = torch.randn(2, 5, 32), torch.randn(2, 32)
    for block in model.blocks:
        assert isinstance(block, Block)
        assert torch.equal(block(tokens, condition), tokens)


def test_the_seed_decides_the_weights_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = build_model(SMALL, 3), build_model(SMALL, 3), build_model(SMALL, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_time_caption_and_place_have_a_say() -> None:
    model, video = awake(), torch.randn(1, 3, 2, 8, 8)
    velocity = model(video, torch.tensor([0.5]), ["a red bike"])
    assert not torch.allclose(model(video, torch.tensor([0.6]), ["a red bike"]), velocity)
    assert not torch.allclose(model(video, torch.tensor([0.5]), ["a blue bike"]), velocity)
    moved = model(video.roll(4, dims=4), torch.tensor([0.5]), ["a red bike"]).roll(-4, dims=4)
    assert not torch.allclose(moved, velocity, atol=1e-5)


def test_samples_of_a_batch_do_not_touch_each_other() -> None:
    model, video, times = awake(), torch.randn(2, 3, 2, 8, 8), torch.tensor([0.2, 0.7])
    together = model(video, times, ["short", "a much longer caption: über ß"])
    alone = model(video[:1], times[:1], ["short"])
    assert torch.allclose(together[:1], alone, atol=1e-5)


def test_captions_are_cut_at_their_limit_and_lone_surrogates_pass() -> None:
    encoder = awake().caption
    assert torch.equal(encoder(["x" * 256]), encoder(["x" * 300]))
    assert encoder(["\ud800", ""]).isfinite().all()


@pytest.mark.parametrize("dim", [6, 32, 100])
def test_every_place_of_a_grid_has_its_own_embedding(dim: int) -> None:
    places = grid_embedding((3, 4, 5), dim, CPU)
    assert places.shape == (60, dim)
    assert len(torch.unique(places, dim=0)) == 60


def test_the_loss_is_nought_for_the_true_velocity_and_a_sample_each() -> None:
    video = torch.rand(3, 3, 2, 4, 4) * 2 - 1
    noise, times = draw_noise_and_times(video, seeded_generator(CPU, 1, 2))

    def knows(mixed: torch.Tensor, at: torch.Tensor, text: object) -> torch.Tensor:
        t = at[:, None, None, None, None]
        assert torch.allclose(mixed, video + t * (noise - video), atol=1e-6)
        return noise - video

    assert rectified_flow_loss(knows, video, ["", "", ""], noise, times).tolist() == [0.0] * 3
    blank = rectified_flow_loss(lambda v, t, c: torch.zeros_like(v), video, ["", "", ""], noise, times)
    assert torch.allclose(blank, (noise - video).square().mean(dim=(1, 2, 3, 4)))


def test_draws_depend_on_seed_step_and_rank_alone() -> None:
    video = torch.zeros(4, 3, 1, 2, 2)

    def draw(*parts: int) -> list[float]:
        noise, times = draw_noise_and_times(video, seeded_generator(CPU, *parts))
        return [*times.tolist(), *noise.flatten().tolist()]

    torch.manual_seed(0)
    first = draw(0, 1, 2)
    torch.manual_seed(9)
    assert draw(0, 1, 2) == first
    assert (
        len({tuple(draw(*parts)) for parts in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1), (2**63 - 1,)]})
        == 6
    )


def test_times_are_logit_normal() -> None:
    _, times = draw_noise_and_times(torch.zeros(20_000, 1, 1, 1, 1), seeded_generator(CPU, 0))
    assert times.min() > 0 and times.max() < 1
    logits = torch.logit(times)
    assert abs(logits.mean()) < 0.03
    assert abs(logits.std() - 1) < 0.03
