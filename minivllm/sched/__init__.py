"""Which tokens run in the next step, and why the others wait."""
