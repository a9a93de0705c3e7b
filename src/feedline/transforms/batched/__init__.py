"""Transforms of whole batches of tensors, as torch operators."""
