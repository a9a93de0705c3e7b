"""Stands in for torchvision, whose ordinary wheels want CUDA's torch; Mosaic imports two names, used nowhere here."""
