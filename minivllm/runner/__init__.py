"""The bridge: plans become tensors, tensors become tokens."""
