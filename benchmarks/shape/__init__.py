"""The shape of the code in numbers: hops, import chains, sizes, comments."""
