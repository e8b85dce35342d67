"""Recipes for published video models, one file per family. They read the folders of diffusers pipelines."""
