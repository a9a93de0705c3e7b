"""A fresh interpreter that loads a builder and answers with one batch. Arguments: socket, dumped file."""

from __future__ import annotations

import socket
import sys

from feedline.workers.transport import Arena, load_builder

with socket.socket(fileno=int(sys.argv[1])) as channel:
    dataset = load_builder([int(sys.argv[2])], channel.recv(1 << 16))
    message = Arena().dumps(dataset[3])
    socket.send_fds(channel, [message.payload], message.fds)
    message.sent()
