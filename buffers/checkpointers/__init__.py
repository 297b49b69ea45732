"""How a buffer's rows and tables go to disk and come back: checkpointers, and the log of the rows in a folder."""
