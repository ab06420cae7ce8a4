"""Which client is in training."""

from __future__ import annotations

import os

import numpy as np


class ClientProgress:
    """The client in training. If `shared`, it is in a file of memory, which other processes of this
    machine can read even when this one is stopped.
    """

    def __init__(self, shared: bool) -> None:
        self.path = ""
        self._client = np.zeros(1, np.int64)
        if shared and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("raydpfl-progress")
            os.ftruncate(descriptor, self._client.nbytes)
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._client = np.memmap(self.path, np.int64, "r+")
        self.set(-1)

    @property
    def client(self) -> int:
        return int(self._client[0])

    def set(self, client: int) -> None:
        """Sets it; -1: none is in training."""
        self._client[0] = client
