"""Exceptions on their way from a worker to the training loop: same type, same arguments, the worker's traceback."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]

from feedline.errors import ReprError


class RemoteException(NamedTuple):
    """An exception in pieces, each of which survives the journey on its own."""

    name: str
    message: str
    traceback: str
    """The worker's own traceback with all causes, without the notes of the exception itself."""
    notes: tuple[str, ...]
    whole: bytes | None
    """The pickled exception; None if it cannot be pickled."""
    type: bytes | None
    args: tuple[bytes, ...]
    attributes: dict[str, bytes]


def pack(error: BaseException) -> RemoteException:
    """Take an exception apart. Never raises, however odd the exception is."""
    cls = type(error)
    return RemoteException(
        name=cls.__name__,
        message=_text(error),
        traceback=_traceback(error),
        notes=tuple(note for note in getattr(error, "__notes__", ()) if isinstance(note, str)),
        whole=_dumps(error),
        type=_dumps(cls),
        args=tuple(_portable(arg) for arg in error.args),
        attributes={name: _portable(value) for name, value in vars(error).items() if name != "__notes__"},
    )


def revive(failure: RemoteException, where: str) -> BaseException:
    """The exception again: type, arguments, attributes and notes kept, and a last note with the worker's traceback.

    torch raises a new exception with `Caught {name} {where}` and the traceback as its only argument, which fails for
    exceptions with other arguments and loses their attributes. Here those words open the note instead, and an error
    looks the same whether workers are used or not. An exception that cannot be made again comes as `ReprError`.
    """
    error = _whole(failure) or _pieced(failure) or ReprError(f"{failure.name}: {failure.message}")
    for note in failure.notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    error.add_note(f"Caught {failure.name} {where}.\nOriginal {failure.traceback}")
    return error


def _whole(failure: RemoteException) -> BaseException | None:
    error = _loads(failure.whole)
    return error if isinstance(error, BaseException) and type(error).__name__ == failure.name else None


def _pieced(failure: RemoteException) -> BaseException | None:
    """The exception without a call of its own constructor, whose arguments are not known."""
    cls = _loads(failure.type)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        return None
    try:
        native = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        error: BaseException = native.__new__(cls)  # type: ignore[call-overload]
        error.args = tuple(_loads(arg) for arg in failure.args)
        vars(error).update((name, _loads(value)) for name, value in failure.attributes.items())
    except Exception:  # noqa: BLE001 - a class that refuses: ReprError tells the rest
        return None
    return error


def _dumps(value: Any) -> bytes | None:
    """Pickled, by value where there is no name to find it by; None for what cannot be pickled."""
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            return bytes(dumps(value))
        except Exception:  # noqa: BLE001, S112 - whatever an exception's own reduction raises
            continue
    return None


def _portable(value: Any) -> bytes:
    """Pickled, or in its place the pickled text that `repr` gives."""
    return _dumps(value) or pickle.dumps(_text(value, repr))


def _loads(data: bytes | None) -> Any:
    """What was pickled; None if it cannot be made again here."""
    try:
        return None if data is None else pickle.loads(data)
    except Exception:  # noqa: BLE001 - whatever a constructor raises that is given other arguments than it wants
        return None


def _text(value: object, text: Callable[[object], str] = str) -> str:
    try:
        return text(value)
    except Exception as error:  # noqa: BLE001 - the `__str__` of somebody's class
        return f"<{type(value).__name__}, and {type(error).__name__} when it was asked for its text>"


def _traceback(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = None
    return "".join(told.format())
