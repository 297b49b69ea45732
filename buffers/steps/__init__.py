"""The step writer: `writer` is its main module; rows are staged, marked by their episodes, then stored."""
