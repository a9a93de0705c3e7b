"""LMDB datasets."""
