"""Datasets of arrays."""
