"""Datasets of text files: lines, JSON lines and CSV."""
