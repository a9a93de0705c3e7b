"""Transforms of torchvision, executed by feedline's kernels."""
