"""Lets other processes use a buffer that one process owns."""
