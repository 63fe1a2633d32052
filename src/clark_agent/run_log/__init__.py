"""The run log: everything that came into a run from outside, written down as it happens."""
