"""Example programs with language models."""
