# SPDX-License-Identifier: Apache-2.0
"""A WebSocket and HTTP client that can misbehave: it writes any bytes and reads what comes, frame by frame."""

import asyncio
import contextlib
import os
import socket
import struct

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10


def frame(opcode, data=b"", *, fin=1, rsv=0, is_masked=True, claimed_size=None):
    """One frame, however wrong: `claimed_size` may differ from the data's own."""
    size = len(data) if claimed_size is None else claimed_size
    mask_bit = 0x80 if is_masked else 0
    if size < 126:
        head = bytes([mask_bit | size])
    elif size < 65_536:
        head = bytes([mask_bit | 126]) + struct.pack("!H", size)
    else:
        head = bytes([mask_bit | 127]) + struct.pack("!Q", size)
    head = bytes([fin << 7 | rsv << 4 | opcode]) + head
    if not is_masked:
        return head + data
    mask = os.urandom(4)
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    masked = int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")
    return head + mask + masked.to_bytes(len(data), "big")


class RawSocket:
    """One connection. `open` gives it after the handshake; `status` and `head` hold the answer to it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.status, self.head = 0, ""

    @classmethod
    async def connect(cls, port, *, receive_bytes=None):
        """Only the TCP connection. `receive_bytes` bounds what the kernel takes for one that does not read."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        # A small limit, so that asyncio itself stops reading early.
        return cls(*await asyncio.open_connection(sock=sock, limit=receive_bytes or 65_536))

    @classmethod
    async def open(cls, port, path="/v1/realtime", *, headers=(), receive_bytes=None):
        """Connect and shake hands, whatever the answer is."""
        self = await cls.connect(port, receive_bytes=receive_bytes)
        lines = [
            f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13", *headers, "", "",
        ]  # fmt: skip
        self.writer.write("\r\n".join(lines).encode())
        await self.read_head()
        return self

    async def read_head(self):
        """Read a status line and headers."""
        self.head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode()
        self.status = int(self.head.split(" ", 2)[1])

    def send(self, *frames):
        """Write frames or any bytes; into the void when the server is gone already."""
        if not self.writer.is_closing():
            self.writer.write(b"".join(frames))

    def say(self, text):
        """Send one text message."""
        self.send(frame(TEXT, text.encode()))

    async def recv(self):
        """One frame as (opcode, data); EOF is (None, b"")."""
        try:
            head = await self.reader.readexactly(2)
            assert head[0] & 0x70 == 0, "the server set a reserved bit"
            assert head[1] < 128, "the server masked a frame"
            size = head[1]
            if size == 126:
                (size,) = struct.unpack("!H", await self.reader.readexactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", await self.reader.readexactly(8))
            return head[0] & 15, await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None, b""

    async def close_code(self):
        """Read to the end; the code of the Close frame, or None when there was none."""
        code = None
        while (received := await asyncio.wait_for(self.recv(), 10))[0] is not None:
            if received[0] == CLOSE:
                code = struct.unpack("!H", received[1][:2])[0] if received[1] else 1005
                self.send(frame(CLOSE, received[1][:2]))
        return code

    async def text(self):
        """The next text message."""
        while (received := await asyncio.wait_for(self.recv(), 10))[0] != TEXT:
            assert received[0] is not None, "the socket ended"
        return received[1].decode()

    async def ended(self):
        """Whether the server ended the connection within a moment, reading nothing."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(65_536), 10) == b""
        return True

    def cut(self):
        """Leave by RST, as a killed process or a dropped phone does."""
        if not self.writer.is_closing():
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self):
        """Leave by FIN."""
        self.writer.close()
