"""Conversion of audio to the inputs and latents of the audio VAEs of diffusion models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamvid.errors import ConfigError

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch

_LEAST = 1e-5


def encode_audio(vae: Any, audio: Tensor) -> Tensor:
    """Encode audio (B, channels, samples) as normalized float32 latents (B, L, C).

    C is the number of channels times the number of mel bins of the latents.
    """
    config, rows = vae.config, []
    for clip in audio:  # one at a time, because the last bits depend on the batch size
        mel = log_mel(clip[None], rate=config.sample_rate, hop=config.mel_hop_length, num_bins=config.mel_bins)
        rows.append(vae.encode(mel.to(vae.dtype)).latent_dist.mode().float().transpose(1, 2).flatten(2))
    found: Tensor = (torch.cat(rows) - vae.latents_mean.float()) / vae.latents_std.float()
    return found


def check_audio(batch: Batch, num_channels: int, rate: int, preset: str) -> None:
    """Raise ConfigError unless a batch's audio has the number of channels and the sample rate that the model needs.

    preset: audio preset for the model.
    """
    rates = batch.fps[~batch.fps.isnan()]
    _, channels, count = batch.audio.shape
    seconds = batch.bucket.num_frames / float(rates[0]) if len(rates) else count / rate
    if channels != num_channels or abs(count / rate - seconds) > 0.1 + 0.1 * seconds:
        raise ConfigError(
            f"data.audio: the audio in bucket {batch.bucket.id} has {channels} channels and {count} samples for "
            f"{seconds:.3g} s, but this model needs {num_channels} channels and {rate} samples per second; set "
            f"data.audio: {{preset: {preset}}}"
        )


def log_mel(waveform: Tensor, *, rate: int, hop: int, num_bins: int, num_fft: int = 1024) -> Tensor:
    """Compute log-mel spectrograms (…, samples // hop + 1, num_bins) from waveforms (…, samples) with values in -1..1.

    The magnitudes of a centered Fourier transform with a Hann window are weighted by triangles of area 1 on Slaney's
    mel scale, as in `AudioProcessor` of Lightricks/LTX-2 (packages/ltx-core/src/ltx_core/model/audio_vae/ops.py at
    2362161).
    """
    from transformers.audio_utils import mel_filter_bank

    flat = waveform.float().reshape(-1, waveform.shape[-1])
    if flat.shape[1] <= num_fft // 2:  # too short to be mirrored at its ends
        flat = torch.nn.functional.pad(flat, (0, num_fft // 2 + 1 - flat.shape[1]))
    window = torch.hann_window(num_fft, device=flat.device)
    spectrum = torch.stft(flat, num_fft, hop, window=window, return_complex=True, pad_mode="reflect").abs()
    bank = mel_filter_bank(num_fft // 2 + 1, num_bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    mel = spectrum.transpose(1, 2) @ torch.as_tensor(bank, dtype=torch.float32, device=flat.device)
    found: Tensor = mel.clamp(min=_LEAST).log()
    return found.reshape(*waveform.shape[:-1], *found.shape[1:])
