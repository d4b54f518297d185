"""Exceptions of the package. Each has the exit code that the program would have."""

from __future__ import annotations

__all__ = [
    "DataError",
    "EngineError",
    "Error",
    "Interrupted",
    "ModelError",
    "OutOfMemory",
    "Refused",
    "UsageError",
]


class Error(Exception):
    """An error of the library.

    ``code`` is the exit code of the program, ``kind`` its name, and ``help`` advice, if there is any.
    """

    code: int = 1
    kind: str = "corrupt"
    help: str | None = None


class DataError(Error):
    """A file cannot be read or written, is damaged, or is not supported."""


class UsageError(Error, ValueError):
    """An argument or a field of a request is wrong."""


class ModelError(Error):
    """The model is missing, unreadable or damaged."""


class Refused(Error):
    """A quality gate or a comparison refuses the result."""


class EngineError(Error):
    """The engine cannot run the model as asked, or has failed."""


class OutOfMemory(Error, MemoryError):
    """The system refuses memory or threads."""


class Interrupted(Error):
    """The work was cancelled."""


_BY_CODE: dict[int, type[Error]] = {
    1: DataError,
    2: UsageError,
    3: ModelError,
    4: Refused,
    5: EngineError,
    6: OutOfMemory,
    130: Interrupted,
}


def _error(code: int, kind: str, message: str, help: str | None) -> Error:
    error = _BY_CODE.get(code, Error)(message)
    error.code, error.kind, error.help = code, kind, help
    if help and hasattr(error, "add_note"):
        error.add_note(f"help: {help}")
    return error
