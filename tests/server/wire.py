"""HTTP by hand, for clients that do not behave."""

import json
import socket
from typing import Any


def post(port: int, path: str, body: dict[str, Any], *, key: str = "", seconds: float = 30.0) -> socket.socket:
    """Send a request and return the connection, nothing read yet."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
    link = socket.create_connection(("127.0.0.1", port), timeout=seconds)
    link.sendall(head.encode() + b"\r\n" + data)
    return link


def read_until(link: socket.socket, mark: bytes) -> bytes:
    """Return what came up to and with `mark`, or all there was."""
    found = b""
    while mark not in found:
        part = link.recv(4096)
        if not part:
            break
        found += part
    return found
