"""LoRA adapter files: their formats, and the names that a layer has in diffusers and in a model's original code."""
