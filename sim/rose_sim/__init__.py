"""The simulator: drives the policy machines of `rose.core` with a virtual clock and trace-driven load."""
