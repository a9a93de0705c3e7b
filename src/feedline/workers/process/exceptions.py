"""Exceptions sent from workers with type, arguments and traceback."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]

from feedline.errors import ReprError


class RemoteException(NamedTuple):
    """Exception in parts, each of which can be unpickled on its own."""

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
    """Split an exception into picklable parts. Never raises."""
    cls = type(error)
    return RemoteException(
        name=cls.__name__,
        message=_text(error),
        traceback=_traceback(error),
        notes=tuple(note for note in getattr(error, "__notes__", ()) if isinstance(note, str)),
        whole=_dumps(error),
        type=_dumps(cls),
        args=tuple(_dumps_or_repr(arg) for arg in error.args),
        attributes={name: _dumps_or_repr(value) for name, value in vars(error).items() if name != "__notes__"},
    )


def rebuild(failure: RemoteException, where: str) -> BaseException:
    """Rebuild the exception and add a note with the worker's traceback.

    Type, arguments, attributes and notes are kept, so an error looks the same with and without workers. The note begins
    with torch's words, `Caught {name} {where}`. (torch itself passes them to a new exception as its only argument,
    which fails for other signatures.) An exception that cannot be rebuilt becomes a `ReprError`.
    """
    error = _load_whole(failure) or _rebuild_from_parts(failure) or ReprError(f"{failure.name}: {failure.message}")
    for note in failure.notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    error.add_note(f"Caught {failure.name} {where}.\nOriginal {failure.traceback}")
    return error


def _load_whole(failure: RemoteException) -> BaseException | None:
    error = _loads(failure.whole)
    return error if isinstance(error, BaseException) and type(error).__name__ == failure.name else None


def _rebuild_from_parts(failure: RemoteException) -> BaseException | None:
    """Rebuild the exception without its constructor, whose arguments are not known."""
    cls = _loads(failure.type)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        return None
    try:
        native = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        error: BaseException = native.__new__(cls)  # type: ignore[call-overload]
        error.args = tuple(_loads(arg) for arg in failure.args)
        vars(error).update((name, _loads(value)) for name, value in failure.attributes.items())
    except Exception:  # noqa: BLE001 - the class refuses: the caller falls back to ReprError
        return None
    return error


def _dumps(value: Any) -> bytes | None:
    """Pickle by name, or else by value; None if neither works."""
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            return bytes(dumps(value))
        except Exception:  # noqa: BLE001, S112 - an exception's own reduction may raise anything
            continue
    return None


def _dumps_or_repr(value: Any) -> bytes:
    """Pickle the value, or its `repr` if it cannot be pickled."""
    return _dumps(value) or pickle.dumps(_text(value, repr))


def _loads(data: bytes | None) -> Any:
    """Unpickle a value; None if that fails."""
    try:
        return None if data is None else pickle.loads(data)
    except Exception:  # noqa: BLE001 - a constructor may raise anything for wrong arguments
        return None


def _text(value: object, text: Callable[[object], str] = str) -> str:
    try:
        return text(value)
    except Exception as error:  # noqa: BLE001 - the `__str__` of a foreign class may raise anything
        return f"<{type(value).__name__}, and {type(error).__name__} when it was asked for its text>"


def _traceback(error: BaseException) -> str:
    formatted = traceback.TracebackException.from_exception(error)
    formatted.__notes__ = None
    return "".join(formatted.format())
