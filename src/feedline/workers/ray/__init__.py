"""Workers that are Ray actors, on this machine or others."""
