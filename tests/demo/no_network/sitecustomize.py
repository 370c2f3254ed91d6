"""
On the path of a Python process, it refuses and writes down every use of a network other than the machine's own while
`NETWORK_LOG` names a file.
"""

import os
import sys


LOCAL_NAMES = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
ADDRESSED = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind")
LOOKED_UP = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")


def refuse(event, args):
    if "NETWORK_LOG" not in os.environ:
        return
    if event in ADDRESSED:
        address = args[1]
        if not isinstance(address, tuple):  # a Unix socket, or none
            return
        host = address[0]
    elif event in LOOKED_UP:
        host = args[0]
    else:
        return
    if host is not None and str(host) not in LOCAL_NAMES:
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(f"{event} {host}\n")
        raise PermissionError(f"no network here: {event} {host}")


sys.addaudithook(refuse)
