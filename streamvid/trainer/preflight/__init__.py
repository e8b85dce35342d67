"""Before a run: does the dataset fit the model, does a step fit in memory, and how long does each bucket take?"""
