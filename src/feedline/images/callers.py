"""Calls whose result the caller discards, seen in its bytecode."""

from __future__ import annotations

import dis
from bisect import bisect_right
from functools import lru_cache
from types import CodeType, FrameType

_VARIABLES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_WITHOUT_EFFECT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL"})
_STATEMENT_LENGTH = 4


def result_is_discarded(frame: FrameType, method: str, receiver: object) -> bool:
    """True if the frame runs the statement `variable.method()` on the receiver.

    False whenever that is not certain. The variable has to hold the receiver itself: a function written in C, which has
    no frame, may stand between the frame and the method, and may use the result.
    """
    variable = _variable_of_statement(frame.f_code, frame.f_lasti, method)
    return variable is not None and frame.f_locals.get(variable) is receiver


@lru_cache(maxsize=256)
def _variable_of_statement(code: CodeType, position: int, method: str) -> str | None:
    """Local variable of the statement `variable.method()` at a position.

    None if there is another call.
    """
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _WITHOUT_EFFECT]
    # The position may be that of a cache behind the instruction.
    call = bisect_right([each.offset for each in instructions], position) - 1
    statement = instructions[max(call - 2, 0) : call + 2]
    if len(statement) != _STATEMENT_LENGTH:
        return None
    variable, attribute, called, after = statement
    is_method = variable.opname in _VARIABLES and attribute.opname in _ATTRIBUTES and attribute.argval == method
    is_plain = called.opname == "CALL" and called.arg == 0 and after.opname == "POP_TOP"
    return str(variable.argval) if is_method and is_plain else None
