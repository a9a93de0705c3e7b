"""The DataLoader: plan, loop, state and report."""
