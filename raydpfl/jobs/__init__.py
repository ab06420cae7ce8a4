"""Runs as jobs of a Ray cluster: what they take along, their logs and what they bring back."""
