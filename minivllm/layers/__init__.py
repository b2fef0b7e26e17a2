"""The parts of the decoder."""
