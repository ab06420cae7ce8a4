"""The networks that a config names, a file a network."""
