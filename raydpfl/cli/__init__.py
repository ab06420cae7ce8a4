"""The command line, its displays, and the view of a run in a notebook."""
