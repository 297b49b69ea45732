"""Examples that keep what they collect."""
