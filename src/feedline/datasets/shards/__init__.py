"""Datasets of sharded record files."""
