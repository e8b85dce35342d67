from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamvid.errors import ConfigError
from streamvid.loader.loader import VideoLoader
from streamvid.recipes.small.autoencoder import (
    SHIPPED,
    Autoencoder,
    AutoencoderConfig,
    load_autoencoder,
    save_autoencoder,
)
from tests.conftest import Sharded


def small() -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder(AutoencoderConfig(outer_width=8, inner_width=12, latent_channels=4)).eval()


def video(*size: int, seed: int = 0) -> Tensor:
    return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@settings(max_examples=25)
@given(size=st.tuples(st.integers(1, 10), st.integers(1, 33), st.integers(1, 33)))
@torch.no_grad()
def test_any_size_is_restored(size: tuple[int, int, int]) -> None:
    model, clip = small(), video(*size)
    latents = model.encode(clip)
    assert latents.shape == (1, *model.latent_shape(size))
    assert model.decode(latents, size).shape == clip.shape
    t, h, w = size
    assert model.latent_shape(size) == (4, -(-(t - 1) // 4) + 1, -(-h // 8), -(-w // 8))


@torch.no_grad()
@pytest.mark.parametrize("model", [small, load_autoencoder], ids=["fresh", "shipped"])
def test_nothing_sees_later_frames(model: object) -> None:
    """Latent i depends on frames up to 4i, and frame 4i on latents up to i; later frames change no bit of either."""
    net = model()  # type: ignore[operator]
    clip = video(17, 16, 24)
    latents, decoded = net.encode(clip), net.decode(net.encode(clip), (17, 16, 24))
    for i in range(5):
        other = torch.cat([clip[:, :, : 4 * i + 1], video(16 - 4 * i, 16, 24, seed=9)], dim=2)
        changed = net.encode(other)
        assert torch.equal(changed[:, :, : i + 1], latents[:, :, : i + 1])
        assert i == 4 or not torch.allclose(changed[:, :, i + 1], latents[:, :, i + 1])
        alone = net.encode(clip[:, :, : 4 * i + 1])
        assert torch.allclose(alone, latents[:, :, : i + 1], atol=1e-5)
        again = net.decode(latents[:, :, : i + 1], (4 * i + 1, 16, 24))
        assert torch.allclose(again, decoded[:, :, : 4 * i + 1], atol=1e-4)


@torch.no_grad()
def test_the_first_frame_alone_has_the_first_latent_of_its_clip() -> None:
    model, clip = load_autoencoder(), video(9, 24, 16)
    image = model.encode(clip[:, :, :1])
    assert image.shape[2] == 1
    assert torch.allclose(image, model.encode(clip)[:, :, :1], atol=1e-5)


@torch.no_grad()
def test_clips_of_a_batch_are_independent() -> None:
    model = small()
    both = torch.cat([video(5, 16, 16, seed=1), video(5, 16, 16, seed=2)])
    assert torch.allclose(model.encode(both)[:1], model.encode(both[:1]), atol=1e-6)


def test_every_weight_gets_a_gradient() -> None:
    model = small()
    model.decode(model.encode(video(9, 16, 16)), (9, 16, 16)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_saved_autoencoder_is_restored(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "a.safetensors"
    model.std.fill_(3.0)
    save_autoencoder(model, path, {"steps": "7"})
    loaded = load_autoencoder(path)
    assert loaded.config == model.config
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.half().float()), name


def test_missing_and_invalid_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.safetensors"):
        load_autoencoder(tmp_path / "no.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"12345678910")
    with pytest.raises(ConfigError, match=r"bad\.safetensors"):
        load_autoencoder(tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match="outer_width=0: must be an integer of at least 1"):
        AutoencoderConfig(outer_width=0)


def test_the_shipped_file_is_small() -> None:
    assert SHIPPED.stat().st_size <= 600_000


@torch.no_grad()
def test_the_shipped_weights_restore_real_clips(sharded: Sharded) -> None:
    """The result is much better than the mean color per latent cell, the best that untrained weights could reach. The
    latents have approximately the mean and deviation of the flow's noise."""
    model, gains, seen = load_autoencoder(), [], []
    with VideoLoader(sharded.root, batch_size=1, num_workers=0, view={"temporal": "head"}) as loader:
        for number, batch in enumerate(loader):
            clip = batch.normalized(torch.float32)[:, :, :5, :128, :128]
            latents = model.encode(clip)
            decoded = model.decode(latents, tuple(clip.shape[2:]))  # type: ignore[arg-type]
            coarse = torch.nn.functional.interpolate(
                torch.nn.functional.avg_pool3d(clip, (1, 8, 8), ceil_mode=True), size=clip.shape[2:], mode="nearest"
            )
            errors = [(made - clip).square().mean() for made in (coarse, decoded)]
            gains.append(10 * torch.log10(errors[0] / errors[1]))
            seen.append(latents.transpose(0, 1).flatten(1))
            if number == 15:
                break
    assert torch.stack(gains).mean() > 2.0
    values = torch.cat(seen, dim=1)
    assert values.mean(dim=1).abs().max() < 0.6
    assert 0.6 < values.std() < 1.5
