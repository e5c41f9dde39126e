"""Connections of the server: uvicorn's protocol of HTTP with bounds for what it waits for without any. A client has so
many seconds for a request's head, from its connection or the head's first byte on, and so many without reading what
was sent to it; a head has so many bytes. How long a body may take is bounded where it is read (app.py). While the
server ends, a request that is on its way is answered, and its answer says that the connection closes. A client that
offers another protocol beside its request (`Upgrade: h2c`, as Java's does with the first one of a connection) is
answered by HTTP/1.1."""
from __future__ import annotations

import json
import socket
from array import array
from asyncio import Transport
from asyncio.events import TimerHandle
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anyshape.base.errors import AnyShapeError

MOST_HEAD = 1 << 16  # bytes of a request before its body
LAST_SECONDS = 0.5  # that a connection without a request stays open when the server ends: one may be on its way
DO = "send a request as docs/deploy.md says"
IDLE, HEAD, BODY = "idle", "head", "body"


class Parser(httptools.HttpRequestParser):  # type: ignore[misc]
    """httptools' parser, which takes what follows a head that offers another protocol for bytes of that one and skips
    the request's body. Here such a head is read once more without its offer."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self.protocol = protocol
        if hasattr(self, "set_dangerous_leniencies"):  # as HttpToolsProtocol does
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        """See `httptools.HttpRequestParser`."""
        rest = memoryview(data)
        while True:  # requests behind one another may each have an offer
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offered:
                rest = rest[offered.args[0]:]
            super().feed_data(self.protocol.head_again())


class BoundedProtocol(HttpToolsProtocol):
    """A connection with bounds on its seconds and on a head's bytes. patience: the seconds; a server has a class of its
    own, see `protocol_of`."""

    patience = 30.0

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.parser = Parser(self)
        self.part = IDLE  # of a message
        self.head = 0  # bytes of the head that has not ended
        self.fields = 0  # bytes of its line and its headers, once they are read
        self.refused = False
        self.begun = 0  # messages
        self.deadline: TimerHandle | None = None
        self.stalled: TimerHandle | None = None
        self.unread = 0
        self.ending = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            # Head and body of an answer are written one after the other: by Nagle's algorithm the body would wait for
            # the client's acknowledgement of the head, which comes 40 ms later. asyncio switches it off only where a
            # socket says IPPROTO_TCP, which those of socket.create_server do not.
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = self.loop.call_later(self.patience, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._meet_deadline()
        self._resumed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        before, begun = self.part, self.begun
        super().data_received(data)
        # a head, or what nobody reads: the rest of a body that was refused, empty lines
        if self.part == HEAD or self._answered():
            if self.part == HEAD and self.begun == begun + (before == IDLE):  # nothing but this head
                self.head += len(data)
            if self.head > MOST_HEAD:
                self._refuse(b"431 Request Header Fields Too Large", f"the head has more than {MOST_HEAD} bytes")
            elif self.deadline is None and not self.transport.is_closing():
                self.deadline = self.loop.call_later(self.patience, self._late)

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        self.part, self.head, self.fields = HEAD, 0, 0
        self.begun += 1
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self.fields += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self.fields += len(name) + len(value) + len(": \r\n")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        if not self.refused:
            super().on_body(body)

    def head_again(self) -> bytes:
        """The head that was read last, without the offer of another protocol."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode()),
                 *(b"%s: %s" % one for one in self.headers if one[0] != b"upgrade"), b"", b""]
        return b"\r\n".join(lines)

    def _offers(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if self._offers():
            return
        self.part, self.head = BODY, 0
        self._meet_deadline()
        if self.refused:
            return
        if self.fields > MOST_HEAD:  # all of it came in one read
            self._refuse(b"431 Request Header Fields Too Large", f"the head has more than {MOST_HEAD} bytes")
            return
        super().on_headers_complete()
        if self.ending:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if self._offers():
            return
        self.part = IDLE
        if not self.refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """See `HttpToolsProtocol`."""
        self._refuse(b"400 Bad Request", "the bytes are no request of HTTP/1.1, or its lengths contradict each other")

    def shutdown(self) -> None:
        """See `HttpToolsProtocol`."""
        self.ending = True
        if self._answered():
            self.loop.call_later(LAST_SECONDS, self._close_idle)
        else:
            super().shutdown()

    def _close_idle(self) -> None:
        if self._answered():
            self.transport.close()

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._resumed()
        super().resume_writing()

    def _meet_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _late(self) -> None:
        self.deadline = None
        if self.part == HEAD:
            self._refuse(b"408 Request Timeout", f"the head did not arrive within {self.patience:g} s")
        else:
            self.transport.abort()

    def _refuse(self, status: bytes, why: str) -> None:
        if self.refused:
            return
        self.refused = True
        text = json.dumps({"error": str(AnyShapeError("the request is refused", why=why, do=DO))}).encode()
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
                             + b"content-length: %d\r\n\r\n" % len(text) + text)
        self.transport.close()

    def _watch(self) -> None:
        """Looks again later whether the client has read anything."""
        self.unread = self.transport.get_write_buffer_size()
        self.stalled = self.loop.call_later(self.patience, self._look)

    def _look(self) -> None:
        if self.transport.get_write_buffer_size() < self.unread:
            self._watch()
        else:
            self.transport.abort()

    def _resumed(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None


def protocol_of(patience: float) -> type[BoundedProtocol]:
    """The protocol of a server whose clients have so many seconds."""
    return type("Connection", (BoundedProtocol,), {"patience": patience})
