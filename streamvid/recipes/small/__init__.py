"""Small recipe: works out of the box, without weights or with its shipped weights, and trains on a CPU.

Reading order: training (the module), flow (the loss), transformer (the model), codec and autoencoder (latents),
text_encoder, audio_encoder.
"""

from streamvid.recipes.small.training import SmallConfig, SmallTraining, build

__all__ = ["SmallConfig", "SmallTraining", "build"]
