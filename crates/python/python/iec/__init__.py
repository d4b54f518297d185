"""Language models on machines you own: an engine, conversion and quantization.

>>> import iec
>>> engine = iec.Engine.embedded(threads=1)
>>> engine.generate("Once upon a time", max_tokens=8, temperature=0).text
', there was a little girl'
>>> engine.close()
"""

from ._iec import __version__
from .conversions import inspect, pack, ptq, verify
from .engine import AsyncEngine, Engine, Stream
from .errors import (
    DataError,
    EngineError,
    Error,
    Interrupted,
    ModelError,
    OutOfMemory,
    Refused,
    UsageError,
)
from .results import Choice, Event, Result, Sampling, Token, ToolCall, Usage

__all__ = [
    "AsyncEngine",
    "Choice",
    "DataError",
    "Engine",
    "EngineError",
    "Error",
    "Event",
    "Interrupted",
    "ModelError",
    "OutOfMemory",
    "Refused",
    "Result",
    "Sampling",
    "Stream",
    "Token",
    "ToolCall",
    "Usage",
    "UsageError",
    "__version__",
    "inspect",
    "pack",
    "ptq",
    "verify",
]
