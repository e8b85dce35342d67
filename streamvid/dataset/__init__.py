"""The contract between sharder and loader: the format, specified in this folder's README.md."""
