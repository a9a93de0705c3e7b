"""Folders of pictures by class."""
