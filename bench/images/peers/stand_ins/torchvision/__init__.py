"""Replacement of torchvision, whose wheels require torch with CUDA; Mosaic imports two names, which are not used."""
