"""Building of batches in workers: fetch, transform, collate."""
