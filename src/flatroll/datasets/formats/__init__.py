"""File formats of other tools: a writer and a reader for each, chunk by chunk or episode by episode."""
