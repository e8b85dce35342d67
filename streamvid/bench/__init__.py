"""What this machine and this store deliver: `streamvid bench`."""
