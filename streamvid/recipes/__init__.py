"""Ready-made training modules: `small`, and `families` of published models.

`registry` lists the families by name. The package imports `modules` and lower layers, torch and safetensors and, on
demand, transformers and diffusers.
"""
