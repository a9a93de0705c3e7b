"""Datasets of text files."""
