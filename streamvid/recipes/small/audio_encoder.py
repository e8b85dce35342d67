"""Audio encoder without weights: the loudness of each frequency in short windows.

(B, channels, N) ─ mean of channels ─ windows of W samples, every W/2 ─ spectrum ─ log ─► (B, 2N/W + 1, W/2 + 1)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SpectrumEncoder(nn.Module):
    """Encoder of audio as log spectra. A silent window is a state of zeros."""

    taper: Tensor

    def __init__(self, window: int) -> None:
        """Build the encoder. window: even number of samples per spectrum."""
        super().__init__()
        self.register_buffer("taper", torch.hann_window(window), persistent=False)

    @property
    def width(self) -> int:
        """Width of a state: number of frequencies."""
        return len(self.taper) // 2 + 1

    def forward(self, audio: Tensor) -> Tensor:
        """Encode audio (B, channels, N) as float32 (B, L, width), where L = 1 + N // (window / 2)."""
        window = len(self.taper)
        mono = audio.float().mean(dim=1)
        spectra = torch.stft(
            mono, window, window // 2, window=self.taper, pad_mode="constant", return_complex=True
        ).abs()
        return torch.log1p(spectra).transpose(1, 2)
