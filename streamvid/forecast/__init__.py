"""What a run would deliver and cost, for metadata and for sealed datasets."""
