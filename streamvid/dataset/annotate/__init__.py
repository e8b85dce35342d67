"""Columns added to a sealed dataset."""
