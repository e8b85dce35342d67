#!/usr/bin/env python3
"""Training with Lightning: the loader is the train dataloader, and Lightning's checkpoints contain its position.

python lightning_module.py DATASET --output run/ --epochs 1
python lightning_module.py DATASET --output run/ --epochs 3       # resumes from run/last.ckpt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import streamvid


class Loader(streamvid.VideoLoader):
    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        super().load_state_dict(state, force=force)
        # Saved at the end of an epoch: a loop would find nothing left of it first, Lightning wants the next one.
        if not self.num_steps_left:
            self.set_epoch(self.epoch + 1)


class FlowModule(lightning.LightningModule):
    def __init__(self, dataset: Path, batch_size: int) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size
        self.net = nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv3d(16, 3, 3, padding=1))
        self.loader_state: dict[str, Any] | None = None
        self.seen: list[tuple[int, list[str]]] = []
        self.losses: list[float] = []

    def train_dataloader(self) -> streamvid.VideoLoader:
        # Here and not before Trainer(): with several devices Lightning starts the other ranks later, and a loader made
        # earlier would take itself for the only one.
        self.loader = Loader(self.dataset, batch_size=self.batch_size)
        if self.loader_state is not None:
            self.loader.load_state_dict(self.loader_state)
        return self.loader

    # Lightning keeps the state of a stateful loader itself, but hands it back in the middle of an epoch only: without
    # these two, a resume at an epoch's end would begin with epoch 0 again.
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loader"] = self.loader.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loader_state = checkpoint["loader"]

    def training_step(self, batch: streamvid.Batch, batch_idx: int) -> Tensor:
        video = batch.normalized(torch.float32)  # Lightning has called batch.to(device)
        x = nn.functional.adaptive_avg_pool3d(video, (min(video.shape[2], 4), 16, 16))
        noise = torch.randn_like(x)
        loss = nn.functional.mse_loss(self.net(0.5 * x + 0.5 * noise), noise)
        # Lightning would guess the batch size from the lengths of captions: say it.
        self.log("loss", loss, batch_size=len(batch.sample_keys))
        self.seen.append((self.loader.epoch, batch.sample_keys))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--output", type=Path, default=Path("run"))
    parser.add_argument("--epochs", type=int, default=1, help="total number of epochs, including those before a resume")
    parser.add_argument("--steps", type=int, default=-1, help="total number of steps; -1 for no limit")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=5)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    module = FlowModule(options.dataset, options.batch_size)
    last = options.output / "last.ckpt"
    settings: dict[str, Any] = {"accelerator": "auto" if torch.cuda.is_available() else "cpu", "devices": 1}
    trainer = lightning.Trainer(
        **settings,
        max_epochs=options.epochs,
        max_steps=options.steps,
        callbacks=[ModelCheckpoint(options.output, save_last=True, every_n_train_steps=options.save_every)],
        use_distributed_sampler=False,  # the loader deals samples to ranks itself
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, ckpt_path=last if last.exists() else None)
    finally:
        module.loader.close()
    print(json.dumps({"step": trainer.global_step, "keys": module.seen, "losses": module.losses}))


if __name__ == "__main__":
    main()
