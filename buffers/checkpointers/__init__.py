"""Saving and loading a buffer's rows and tables: checkpointers, and the log of rows in a folder."""
