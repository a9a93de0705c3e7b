"""Checks that ranks agree, and epochs of unequal length."""
