"""Samples from messages, and messages without a sample."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from feedline.core.arguments import function_of
from feedline.core.live import FailedMessage, LiveDraw
from feedline.core.rng import Address
from feedline.errors import MessageTooLargeError, note

MessageDecode = Literal["bytes", "text", "json"] | Callable[[Any], Any]
"""Name of a decoder, or a function of a message."""


def _as_it_is(message: Any) -> Any:
    return message


def _text(message: bytes) -> str:
    return message.decode()


_raw_decode = json.JSONDecoder().raw_decode


def _json(message: bytes) -> Any:
    """The value of a JSON text, faster than `json.loads`."""
    try:
        text = message.decode()
        value, end = _raw_decode(text)
    except ValueError:
        return json.loads(message)  # space before the value, another encoding, or the error
    return value if end == len(text) else json.loads(message)


MESSAGE_DECODERS: dict[str, Callable[[Any], Any]] = {"bytes": _as_it_is, "text": _text, "json": _json}
"""Decoders by name. Unlike those of `datasets.decoding`, they import neither torch nor Pillow."""


_REMEDY = "on_error='skip' leaves out such messages, and fl.ErrorPolicy(quarantine=...) keeps their content"


@dataclass(frozen=True, slots=True)
class MessageDecoder:
    """A function of one message, and the action if it raises."""

    function: Callable[[Any], Any]
    largest: int
    is_pure: bool = False
    """True for functions that draw no random numbers and may be called twice."""

    def __call__(
        self, messages: Sequence[Any], name: Callable[[int], str], address: Address, *, skips: bool
    ) -> tuple[LiveDraw, int]:
        """The samples of messages, and the number of messages used.

        `name(row)` names a message in errors. With `skips`, a message that fails is used, and listed as failed. Without
        `skips`, its error is raised if it is the first message; otherwise the samples end before it.
        """
        if self.is_pure and (whole := self._all_at_once(messages)) is not None:
            return LiveDraw(whole), len(messages)
        decode, samples, failed = self._checked, list[Any](), list[FailedMessage]()
        for address.row, message in enumerate(messages):
            try:
                samples.append(decode(message))
            except Exception as error:
                row = address.row or 0
                if skips:
                    failed.append(FailedMessage(name(row), f"{type(error).__name__}: {error}", _base64(message)))
                elif row:
                    return LiveDraw(samples), row
                else:
                    note(error, f"feedline: {name(row)} cannot be decoded; {_REMEDY}")
                    raise
        return LiveDraw(samples, failed), len(messages)

    def _all_at_once(self, messages: Sequence[Any]) -> list[Any] | None:
        """The samples of all messages; None if a message fails."""
        try:
            size = _size_of_row if messages and isinstance(messages[0], dict) else len
            if max(map(size, messages), default=0) > self.largest:
                return None
            return list(map(self.function, messages))
        except Exception:  # noqa: BLE001 - it is raised again for the message
            return None

    def _checked(self, message: Any) -> Any:
        size = len(message) if isinstance(message, bytes) else _size_of_row(message)
        if size > self.largest:
            raise MessageTooLargeError(
                f"a message of {size:,} bytes is larger than LiveLimits.message_nbytes={self.largest:,}: "
                "raise the limit, or leave out such messages by on_error='skip'"
            )
        if isinstance(message, Exception):  # the error of the source about a message that it could not read
            raise message
        return self.function(message)


def message_decoder(decode: MessageDecode, largest: int) -> MessageDecoder:
    """The decoder of a stream; `ArgumentError` for an unknown name."""
    return MessageDecoder(function_of("decode", decode, MESSAGE_DECODERS), largest, is_pure=not callable(decode))


def _size_of_row(message: Any) -> int:
    """Total length of texts and binaries in a row; otherwise 0."""
    values = message.values() if isinstance(message, dict) else ()
    return sum(len(value) for value in values if isinstance(value, bytes | str))


def _base64(message: Any) -> str:
    content = message if isinstance(message, bytes) else repr(message).encode()
    return b64encode(content).decode()
