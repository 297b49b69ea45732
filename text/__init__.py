"""Tokenized text, and rollouts of language models as flat batches."""

__all__: list[str] = []
