"""Storages whose rows are files: a log of immutable segments."""
