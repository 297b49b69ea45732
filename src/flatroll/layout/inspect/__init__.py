"""Tools that show and check a batch: audit, explain, describe, timeline."""
