"""The commands, in a file for each group."""
