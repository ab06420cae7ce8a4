"""Has a process forked that this one was to be, by a server of `forks`, and waits for its end, or
that of the parent.
"""

import json
import os
import select
import signal
import socket
import sys

parent = os.getppid()
folder = os.path.dirname(os.path.abspath(__file__))
kind = "workers" if "/ray/_private/workers/" in sys.argv[1] else "commands"
with socket.socket(socket.AF_UNIX) as server:
    server.connect(f"{folder}/{kind}")
    asked = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "deaf": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "held": True,
    }
    text = json.dumps(asked).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(text)
    while not select.select([server], [], [], 1)[0] and os.getppid() == parent:
        pass
