"""Checks before a run: whether the dataset fits the model, and what memory and time a step in each bucket needs."""
