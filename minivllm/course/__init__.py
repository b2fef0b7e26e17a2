"""What lessons need beside the engine. Nothing of the engine imports from here."""
