"""Epochs that begin with another version of the datasets than the epoch before."""
