"""Ready-made training modules. `small` works out of the box: it needs no weights, or uses those that ship with it.

Imports modules and below; torch, safetensors, and transformers when asked for. Reading order: small (the module), flow
(the loss), transformer (the model), codec and autoencoder (latents), text_encoder.
"""
