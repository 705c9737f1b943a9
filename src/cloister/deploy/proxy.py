"""HTTP proxies: how a party reaches the coordinator where only a proxy may connect to the outside.

    proxy = "http://proxy.example.org:3128"                in local/site.toml; or http://user:password@...

The proxy receives `CONNECT host:port` and passes bytes on. TLS is between the two carriers, inside the tunnel, so the
proxy learns the coordinator's name and port, times and sizes, as any router does. The proxy resolves the coordinator's
name; the party's machine resolves the proxy's. A proxy that breaks TLS open cannot be used: neither end accepts its
certificate.

Credentials are for the basic scheme. They are in no log, receipt, error or `repr`. The confined carrier has to know
them, so they should be of an account that can do nothing else.
"""

from __future__ import annotations

import base64
import re
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from cloister.errors import ParameterError

MOST_HEAD = 8192  # bytes of a proxy's answer
WANTED = 'proxy must be as "http://proxy.example.org:3128" or "http://user:password@proxy.example.org:3128"'
NEXT = {  # what a status means to who runs the party
    403: "it does not allow this host and port; have it allow CONNECT to them",
    407: "it requires a user name and a password, or rejects these; write them as http://user:password@host:port",
    502: "it cannot reach the coordinator, or its name is unknown there",
    503: "it cannot reach the coordinator, or its name is unknown there",
    504: "it got no answer from the coordinator",
}


class ProxyError(ConnectionError):
    """A proxy that opens no tunnel; says why, and what to do."""


@dataclass(frozen=True)
class Proxy:
    """Where the proxy is, and the credentials that it wants."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str) -> Proxy:
        """Read the line of site.toml; an error does not repeat it, since it may contain a password."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ParameterError(WANTED) from None
        if parts.scheme != "http" or not host or not port or parts.path not in ("", "/") or parts.query:
            why = "; only plain http to the proxy is supported, TLS is inside" if parts.scheme == "https" else ""
            raise ParameterError(WANTED + why)
        authorization = ""
        if parts.username is not None:
            user, password = unquote(parts.username), unquote(parts.password or "")
            if not user or ":" in user or not (user + password).isprintable():
                raise ParameterError(f"{WANTED}; write special characters as %3A")
            authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        return cls(host, port, authorization)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def open_tunnel(sock: socket.socket, host: str, port: int, authorization: str, seconds: float) -> None:
    """Have the proxy at the other end of `sock` connect to `host`:`port`; `ProxyError` says why it did not."""
    end = time.monotonic() + seconds
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    lines += [f"Proxy-Authorization: {authorization}"] if authorization else []
    sock.settimeout(seconds)
    sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # byte by byte: what comes after it is TLS
        sock.settimeout(max(0.01, end - time.monotonic()))
        try:
            more = sock.recv(1)
        except TimeoutError:
            raise ProxyError(f"the proxy did not answer within {seconds:g} s") from None
        if not more or len(head) >= MOST_HEAD or time.monotonic() > end:
            raise ProxyError("the proxy gave no valid answer; is this the address of an HTTP proxy?")
        head += more
    said = re.match(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r\n", head)
    if said is None:
        raise ProxyError("the proxy gave no valid answer; is this the address of an HTTP proxy?")
    status = int(said[1])
    if not 200 <= status < 300:
        why = NEXT.get(status, "it opens no tunnel")
        raise ProxyError(f"the proxy answered {status} to CONNECT {target}: {why}")
