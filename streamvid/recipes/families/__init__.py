"""Recipes of published video models, one file per family. Their folders are those of diffusers' pipelines."""
