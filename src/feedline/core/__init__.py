"""Values and tools without policy."""
