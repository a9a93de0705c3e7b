"""Figures of a running loader: measured, judged and published."""
