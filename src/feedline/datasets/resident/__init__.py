"""Data that lives in the memory of a device."""
