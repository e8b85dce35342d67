"""Epochs that begin with a different version of the datasets than the previous epoch."""
