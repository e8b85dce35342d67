"""Files of LoRA adapters: their formats, and the names that a layer has in diffusers and in a model's original code."""
