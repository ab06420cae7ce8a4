"""The six choices of an algorithm, and what is measured of them."""
