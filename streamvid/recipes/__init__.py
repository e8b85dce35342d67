"""Ready-made training modules. `small` works out of the box, without weights or with its shipped weights.

The package imports `modules` and lower layers, torch, safetensors and, on demand, transformers. Reading order: small
(the module), flow (the loss), transformer (the model), codec and autoencoder (latents), text_encoder.
"""
