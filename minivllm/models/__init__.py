"""From a checkpoint to a decoder that runs."""
