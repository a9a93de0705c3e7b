"""Datasets of other libraries, read by feedline with equal results."""
