"""The loop around scheduler and runner, and the text around the tokens."""
