"""Data in the memory of a device."""
