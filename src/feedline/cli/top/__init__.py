"""Live view of the loaders of other processes."""
