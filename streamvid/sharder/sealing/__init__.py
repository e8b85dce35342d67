"""Parts of sealing: names of index files, facts for the manifest, and the next version of a dataset."""
