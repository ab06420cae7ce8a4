"""How a config is read: registry of members, overrides, suggestions, user-defined classes."""
