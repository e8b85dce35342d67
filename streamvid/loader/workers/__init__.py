"""Decode processes and the memory they share with the loader."""
