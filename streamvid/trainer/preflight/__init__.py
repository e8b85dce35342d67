"""Checks before a run: whether the dataset fits the model, and how much memory and time a step needs in each bucket."""
