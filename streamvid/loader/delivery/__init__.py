"""From requests to complete batches: fetch, decode, replace bad samples."""
