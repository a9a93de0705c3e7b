"""LMDB environments."""
