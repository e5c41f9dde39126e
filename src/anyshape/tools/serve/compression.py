"""Decompression of requests (`Content-Encoding: gzip` or `deflate`), a bounded piece at a time, for a few bytes may
stand for very many."""
from __future__ import annotations

import zlib
from collections.abc import Iterator

CODINGS = ("gzip", "x-gzip", "deflate")
PIECE = 1 << 18  # bytes that a step makes at most
_EITHER = zlib.MAX_WBITS | 32  # the header of gzip or of zlib, which `deflate` means in HTTP


class CompressionError(Exception):
    """The bytes are not compressed as the request says."""


class Decompressor:
    """The bytes of one request; gzip may have several members."""

    def __init__(self) -> None:
        self.member = zlib.decompressobj(_EITHER)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What a part of the compressed body stands for, at most `PIECE` bytes at a time.

        Raises:
            CompressionError: it is damaged.
        """
        while data:
            if self.member.eof:
                self.member = zlib.decompressobj(_EITHER)
            try:
                piece = self.member.decompress(data, PIECE)
                data = self.member.unused_data if self.member.eof else self.member.unconsumed_tail
                yield piece
                while not data and not self.member.eof and len(piece) == PIECE:  # what it has not given out yet
                    piece = self.member.decompress(b"", PIECE)
                    yield piece
            except zlib.error as error:
                raise CompressionError(str(error)) from None

    def end(self) -> None:
        """All has come.

        Raises:
            CompressionError: the end is missing.
        """
        if not self.member.eof:
            raise CompressionError("it ends too early")
