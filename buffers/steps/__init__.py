"""The step writer: `writer` is the entrance; rows are staged, then stored; episodes give them markers."""
