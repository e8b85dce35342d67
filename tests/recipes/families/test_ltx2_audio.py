"""Tests of LTX-2 with audio: spectrograms, latents, the joint loss, and batches in which some clips have no audio."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import Batch
from streamvid.modules.build import build_module
from streamvid.modules.config import LoraConfig, ModelConfig
from streamvid.modules.encoding import with_encoded
from streamvid.recipes.diffusion.audio import log_mel
from streamvid.recipes.registry import find_recipe
from tests.recipes.official import mse
from tests.recipes.small_batches import add_audio, make_batch
from tests.recipes.test_losses_of_families import built
from tests.recipes.tiny import make_model

SIZE = (9, 64, 96)


def to_mel(hertz: float) -> float:
    """Convert to Slaney's mel scale: linear below 1 kHz, logarithmic above (Auditory Toolbox, 1998)."""
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def expected_mel(wave: NDArray[np.float64], rate: int, hop: int, num_bins: int, num_fft: int) -> NDArray[np.float64]:
    """Compute the spectrogram from its definition, without the libraries that the recipe uses."""
    padded = np.pad(wave, num_fft // 2, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(num_fft) / num_fft)
    starts = range(0, len(padded) - num_fft + 1, hop)
    spectrum = np.abs(np.fft.rfft(np.stack([padded[i : i + num_fft] * window for i in starts])))
    grid = np.linspace(0, to_mel(rate / 2), num_bins + 2)
    hertz = np.array([200 * mel / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27) for mel in grid])
    bins = np.arange(num_fft // 2 + 1) * rate / num_fft
    rising = (bins[None] - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
    falling = (hertz[2:, None] - bins[None]) / (hertz[2:] - hertz[1:-1])[:, None]
    bank = np.clip(np.minimum(rising, falling), 0, None) * (2 / (hertz[2:] - hertz[:-2]))[:, None]
    return np.log(np.clip(spectrum @ bank.T, 1e-5, None))


def test_spectrograms_are_those_of_the_official_processor() -> None:
    time = np.arange(3200) / 16000
    wave = 0.4 * np.sin(2 * np.pi * 440 * time) + 0.2 * np.sin(2 * np.pi * 3100 * time)
    found = log_mel(torch.tensor(wave, dtype=torch.float32), rate=16000, hop=160, num_bins=64)
    assert found.shape == (21, 64)
    np.testing.assert_allclose(found.numpy(), expected_mel(wave, 16000, 160, 64, 1024), atol=1e-2)


def batch_with_audio(present: tuple[bool, ...]) -> Batch:
    return add_audio(make_batch(SIZE, ("a red bike", "a blue car", "a cat")[: len(present)]), present)


def ready(module: Any, batch: Batch) -> Batch:
    return with_encoded(batch, module.encode(batch))


def official(module: Any, batch: Batch, row: int) -> float:
    """Compute FlowMatchSFTAudioVideoLoss of DiffSynth-Studio (diffsynth/diffusion/loss.py at a5a54d83): both modalities
    at the same time step, and the sum of their mean squared errors."""
    drawn, audio = module.draw(batch), batch.audio_latents[row : row + 1]
    sigma, noise = drawn.times[row], module.audio_noise(batch)[row : row + 1]
    latents, video_noise = batch.latents[row : row + 1], drawn.noise[row : row + 1]
    (_, c, t, h, w) = latents.shape
    tokens, noise_tokens = (x.permute(0, 2, 3, 4, 1).reshape(1, -1, c) for x in (latents, video_noise))
    of_video, of_audio = module.transformer(
        hidden_states=(1 - sigma) * tokens + sigma * noise_tokens,
        audio_hidden_states=(1 - sigma) * audio + sigma * noise,
        encoder_hidden_states=batch.video_text[row : row + 1],
        audio_encoder_hidden_states=batch.audio_text[row : row + 1],
        encoder_attention_mask=batch.text_attention[row : row + 1],
        audio_encoder_attention_mask=batch.text_attention[row : row + 1],
        timestep=(sigma * 1000).reshape(1, 1).expand(1, t * h * w),
        audio_timestep=(sigma * 1000).reshape(1),
        sigma=(sigma * 1000).reshape(1),
        num_frames=t,
        height=h,
        width=w,
        fps=float(batch.fps[row]),
        audio_num_frames=audio.shape[1],
        use_cross_timestep=True,
        return_dict=False,
    )
    return mse(of_video, noise_tokens - tokens) + mse(of_audio, noise - audio)


def test_the_loss_is_that_of_video_and_audio(tmp_path: Path) -> None:
    module = built("ltx-2-audio", tmp_path, first_frame=0)
    batch = ready(module, batch_with_audio((True, True)))
    assert batch.audio_latents.shape == (2, 10, 8)  # 37 time steps of the spectrogram, in groups of 4
    with torch.no_grad():
        found, expected = module(batch)["loss"], [official(module, batch, row) for row in range(2)]
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-5, atol=0)


def test_clips_without_audio_train_only_their_video(tmp_path: Path) -> None:
    module = built("ltx-2-audio", tmp_path)
    mixed = ready(module, batch_with_audio((True, False, True)))
    silent = ready(module, make_batch(SIZE, ("a red bike", "a blue car", "a cat")))
    losses, alone = module(mixed)["loss"], module(silent)["loss"]
    torch.testing.assert_close(losses[1], alone[1], rtol=1e-5, atol=0)
    assert (losses[[0, 2]] > alone[[0, 2]]).all()
    losses[1].backward(retain_graph=True)
    of_audio = module.transformer.transformer_blocks[0].audio_attn1.to_q.weight
    assert of_audio.grad is None or not of_audio.grad.any()
    losses[0].backward()
    assert of_audio.grad.any()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_parameters_that_only_clips_with_audio_use_are_named(kind: str, tmp_path: Path) -> None:
    """DDP then looks for unused parameters, because one rank's batch may have audio while another rank's has none."""
    recipe = find_recipe("ltx-2-audio")
    lora = LoraConfig(base_model=recipe.base_model, rank=4, target_modules=recipe.lora_targets)
    args = {"model": str(make_model("ltx-2-audio", tmp_path / "model")), "encoder_dtype": "float32"}
    config = ModelConfig(factory=recipe.factory, args=args, lora=lora if kind == "lora" else LoraConfig())
    module: Any = build_module(config, task="sft", seed=0)
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    module(ready(module, batch_with_audio((False, False))))["loss"].sum().backward()
    without = {name for name, one in trained.items() if one.grad is None}
    assert without == {name for name in trained if module.is_unused(name)} != set()
    module(ready(module, batch_with_audio((True, False))))["loss"].sum().backward()
    assert all(one.grad is not None for one in trained.values())
    assert module.has_unused_parameters


def test_latents_are_normalized_by_the_statistics_of_the_model(tmp_path: Path) -> None:
    module = built("ltx-2-audio", tmp_path)
    batch = batch_with_audio((True,))
    plain = module.encode(batch)["audio_latents"]
    mean, std = torch.linspace(-1, 1, 8), torch.linspace(0.5, 2, 8)
    module.audio_vae.latents_mean.copy_(mean)
    module.audio_vae.latents_std.copy_(std)
    pipe = module.pipeline()
    found = module.encode(batch)["audio_latents"]
    torch.testing.assert_close(pipe._denormalize_audio_latents(found, mean, std), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("channels", "count"), [(1, 5760), (2, 17280)])
def test_audio_of_another_form_is_refused(channels: int, count: int, tmp_path: Path) -> None:
    module = built("ltx-2-audio", tmp_path)
    audio = {"audio": torch.zeros(1, channels, count), "audio_present": torch.ones(1, dtype=torch.bool)}
    with pytest.raises(ConfigError, match=r"data.audio: \{preset: ltx-2\}"):
        module.encode(make_batch(SIZE, ("a red bike",)).with_fields(audio))
