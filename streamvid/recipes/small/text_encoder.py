"""Text encoders that return one state per token: fixed features of bytes, or the states of a published model.

    "a red bike" ──► (L, D) float32, where L depends on the caption; a batch is a list of B such tensors

For every encoder, an empty text is one state of zeros, so that no model has to run for it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from streamvid.config import Options, option
from streamvid.errors import ConfigError

_log = logging.getLogger(__name__)

BYTES_WIDTH = 192
_NEIGHBOURS = 5
_WIDTH_NAMES = ("hidden_size", "d_model", "dim")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Options):
    """Options for the text encoder.

    Kind "bytes" needs no files. Kind "transformers" reads a folder with config.json, model.safetensors and tokenizer
    files. Nothing is downloaded, and no code in the folder runs.
    """

    kind: Literal["bytes", "transformers"] = option("bytes", help="Kind of text encoder.")
    path: Path | None = option(None, help="Folder that contains a text encoder.")
    package: str | None = option(
        None, help="Installed Python package that contains a text encoder; an alternative to path."
    )
    max_tokens: int = option(
        256, minimum=2, help="Maximum caption length: in bytes for kind 'bytes', otherwise in tokens."
    )
    width: int | None = option(None, minimum=2, help="Width of the text states.", shown_default="from config.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))
        wanted = 1 if self.kind == "transformers" else 0
        if (self.path is not None) + (self.package is not None) != wanted:
            raise ConfigError(
                f"kind is {self.kind!r}, path is {str(self.path) if self.path else None!r} and package is "
                f"{self.package!r}; " + ("set exactly one of path and package" if wanted else "omit path and package")
            )
        if self.kind == "bytes" and self.width not in (None, BYTES_WIDTH):
            raise ConfigError(f"width is {self.width}, but kind 'bytes' always has width {BYTES_WIDTH}; omit width")

    @property
    def folder(self) -> Path:
        """Folder that contains the weights for kind "transformers". Raises ConfigError if it cannot be found."""
        if self.path is not None:
            missing = [name for name in ("config.json", "*.safetensors") if not any(self.path.glob(name))]
            if missing:
                raise ConfigError(
                    f"text.path={str(self.path)!r}: the folder has no {' and no '.join(missing)}; use a folder written "
                    "by save_pretrained"
                )
            return self.path
        # Located without an import, because a package of weights may import much more.
        try:
            spec = importlib.util.find_spec(self.package) if self.package else None
        except (ImportError, ValueError):  # the parent of a dotted name is missing, or the name is invalid
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"text.package={self.package!r} is not an installed package; install it, or set text.path instead"
            )
        found = [file.parent for root in spec.submodule_search_locations for file in Path(root).rglob("config.json")]
        folders = [folder for folder in found if any(folder.glob("*.safetensors"))]
        if len(folders) != 1:
            raise ConfigError(
                f"text.package={self.package!r}: {len(folders)} folders contain config.json and *.safetensors, but "
                "exactly one must contain them; set text.path to a folder instead"
            )
        return folders[0]

    @property
    def states_width(self) -> int:
        """Width of the text states, read without loading the encoder. Raises ConfigError if it is unknown."""
        if self.kind == "bytes":
            return BYTES_WIDTH
        if self.width is not None:
            return self.width
        file = self.folder / "config.json"
        try:
            config = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot read {file}: {reason}; use a folder written by save_pretrained") from None
        widths = [config[name] for name in _WIDTH_NAMES if isinstance(config.get(name), int)]
        if not widths:
            raise ConfigError(
                f"{file} has no integer {', '.join(_WIDTH_NAMES[:-1])} or {_WIDTH_NAMES[-1]}; set text.width"
            )
        return int(widths[0])


def no_text(width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the states of an empty text: zeros (1, width)."""
    return torch.zeros(1, width, device=device)


class BytesEncoder(nn.Module):
    """Text encoder that returns fixed random features for each byte and its neighbors.

    It has no weights and no tokenizer, and returns the same features on every machine. The model that uses the features
    must learn their meaning.
    """

    table: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.width, self.max_tokens = BYTES_WIDTH, config.max_tokens
        # From numpy, whose numbers for a seed are the same on every machine and in every version.
        table = np.random.RandomState(0).standard_normal((256, BYTES_WIDTH * _NEIGHBOURS)).astype("float32")
        self.register_buffer("table", torch.from_numpy(table), persistent=False)

    def forward(self, text: Sequence[str]) -> list[Tensor]:
        """Encode B captions as B float32 tensors (L_i, width), where L_i is the number of UTF-8 bytes."""
        return [self._states(caption) if caption else no_text(self.width, self.table.device) for caption in text]

    def _states(self, caption: str) -> Tensor:
        encoded = list(caption.encode("utf-8", "replace")[: self.max_tokens])
        rows = self.table[torch.tensor(encoded, device=self.table.device)].view(-1, _NEIGHBOURS, self.width)
        middle = _NEIGHBOURS // 2
        around = functional.pad(rows, (0, 0, 0, 0, middle, middle))
        joined = torch.stack([around[at : at + len(encoded), at] for at in range(_NEIGHBOURS)]).sum(dim=0)
        # Without the ReLU, five neighbors would carry no more information than each of them alone.
        return functional.relu(joined / _NEIGHBOURS**0.5)


class TransformersEncoder(nn.Module):
    """Text encoder from `transformers` that returns the last hidden states of an encoder or encoder-decoder model."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"text.kind='transformers' requires {error.name}; run `pip install 'transformers>=4.45'`"
            ) from None
        folder = str(config.folder)
        safe = {"local_files_only": True, "trust_remote_code": False}
        try:
            with _without_bars():
                self.tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
                loaded = AutoModel.from_pretrained(folder, use_safetensors=True, **safe).float()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"cannot load the text encoder in {folder!r}: {error}; use a folder written by save_pretrained"
            ) from None
        self.model = loaded.get_encoder() if loaded.config.is_encoder_decoder else loaded
        self.max_tokens, self.width = config.max_tokens, config.states_width
        _log.info("text encoder: %s, with hidden states of width %d", folder, self.width)

    def forward(self, text: Sequence[str]) -> list[Tensor]:
        """Encode B captions as B float32 tensors (L_i, width), where L_i is the number of tokens.

        Special tokens are included.
        """
        return [self._states(caption) for caption in text]

    def _states(self, caption: str) -> Tensor:
        device = next(self.model.parameters()).device
        if not caption:
            return no_text(self.width, device)
        # One caption at a time, because padding would change the last bits of the states, and so the losses.
        tokens = self.tokenizer(caption, truncation=True, max_length=self.max_tokens, return_tensors="pt").to(device)
        states: Tensor = self.model(**tokens).last_hidden_state[0]
        return states.float()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers. A small encoder loads so quickly that they are not needed."""
    from transformers.utils import logging as bars

    were_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]


def build_text_encoder(config: TextConfig) -> BytesEncoder | TransformersEncoder:
    """Build the frozen text encoder that `config` describes. Raises ConfigError if it cannot be loaded."""
    encoder = BytesEncoder(config) if config.kind == "bytes" else TransformersEncoder(config)
    encoder.eval().requires_grad_(False)
    return encoder


def pad_states(states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad B tensors (L_i, D) with zeros to one tensor (B, L_max, D).

    Return this tensor and a bool mask (B, L_max) that is False for padding.
    """
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    lengths = torch.tensor([len(rows) for rows in states], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device)[None] < lengths[:, None]
