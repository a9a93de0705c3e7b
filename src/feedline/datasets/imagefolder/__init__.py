"""Folders of images by class."""
