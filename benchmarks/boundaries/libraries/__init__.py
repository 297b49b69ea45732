"""One file for each library: its package, and a function for each fixture that it has a part for."""
