"""The kinds of directories that a report is made of, a file a kind."""
