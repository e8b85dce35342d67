"""Parts of sealing: the names of index files, the facts that the manifest contains, and the next version of a dataset."""
