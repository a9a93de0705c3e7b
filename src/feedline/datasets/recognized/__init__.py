"""Datasets of other libraries, read by feedline where the result is the same."""
