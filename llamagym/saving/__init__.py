"""Files that stay whole: atomic folders, state files, checkpoints."""
