"""Loading of uniform batches from a sealed dataset, on one of many ranks: fetch, decode, batch.

Packages and files import only from those to their left: options, view ← workers, mix ← delivery ← batch ← setup ←
loader. Read loader.py and mix.py, then the packages in the order view, delivery, workers, batch.

This file imports nothing, because decode workers import it and must not load torch.
"""
