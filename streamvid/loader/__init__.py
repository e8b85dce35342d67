"""From a sealed dataset to uniform batches: fetch, decode, batch, on one rank of many.

Rooms and files import only from those to their left: options, view ← workers, mix ← delivery ← batch ← setup ←
loader. Read loader.py, mix.py, then the rooms in the order view, delivery, workers, batch.

Kept free of imports: decode workers start here and must not pay for torch.
"""
