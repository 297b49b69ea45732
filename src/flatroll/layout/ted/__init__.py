"""TED (root and ``"next"`` side by side, each observation twice) to forms with each observation once, and back."""
