"""Transforms applied to rows on their way into a buffer or out of it."""
