"""The backend of recurrent modules in Triton: the outer ring of this room."""
