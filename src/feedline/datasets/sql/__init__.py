"""Datasets of SQL databases."""
