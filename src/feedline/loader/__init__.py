"""The DataLoader: plan, loop, state, report."""
