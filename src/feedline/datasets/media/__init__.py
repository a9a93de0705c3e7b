"""Clips of videos, and ranges of audio files."""
