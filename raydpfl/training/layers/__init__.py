"""Layers whose passes are written for chunks of clients."""
