"""From a sealed dataset to uniform batches: fetch, decode, batch, on one rank of many.

Kept empty of imports: decode workers start here and must not pay for torch.
"""
