"""`feedline inspect`: a summary of folders and shards."""
