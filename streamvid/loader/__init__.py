"""Loader that fetches and decodes samples of sealed datasets, and delivers them in uniform batches to one rank.

Packages and files import only from those to their left: options, view ← workers, mix ← delivery ← batch ← setup ←
loader. Read loader.py and mix.py, then the packages in the order view, delivery, workers, batch.

This file imports nothing, because decode workers import it and must not load torch.
"""
