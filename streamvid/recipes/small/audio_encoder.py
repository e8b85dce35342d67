"""Audio encoder without weights: the loudness of frequency bands in short windows.

(B, channels, N) ─ mean of channels ─ windows of W samples, every W/2 ─ spectrum ─ bands ─ log ─► (B, 2N/W + 1, 32)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_BANDS = 32


class BandEncoder(nn.Module):
    """Encoder that turns audio into the log loudness of frequency bands. A silent window becomes a state of zeros."""

    taper: Tensor
    bands: Tensor

    def __init__(self, window: int) -> None:
        """Build the encoder.

        window: even number of samples per state.
        """
        super().__init__()
        self.register_buffer("taper", torch.hann_window(window), persistent=False)
        self.register_buffer("bands", _bands(window // 2 + 1), persistent=False)

    def forward(self, audio: Tensor) -> Tensor:
        """Encode audio (B, channels, N) as float32 states (B, L, NUM_BANDS), where L = 1 + N // (window / 2)."""
        window, mono = len(self.taper), audio.float().mean(dim=1)
        spectra = torch.stft(mono, window, window // 2, window=self.taper, pad_mode="constant", return_complex=True)
        return torch.log1p(spectra.abs().transpose(1, 2) @ self.bands)


def _bands(num_frequencies: int) -> Tensor:
    """Return weights (num_frequencies, NUM_BANDS): overlapping triangles, which are wider at high frequencies."""
    steps = torch.arange(NUM_BANDS + 2, dtype=torch.float64)
    # From 0 to the highest frequency, but no band is narrower than the distance of two frequencies.
    edges = ((num_frequencies - 1) ** (steps / steps[-1]) - 1) * (num_frequencies - 1) / (num_frequencies - 2)
    edges = torch.maximum(edges, steps)
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    frequency = torch.arange(num_frequencies, dtype=torch.float64)[:, None]
    rising, falling = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
    return torch.minimum(rising, falling).clamp(min=0).float()
