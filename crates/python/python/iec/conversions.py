"""Conversions. Options have the names of the program's commands; ``progress(label, done, total)`` is called on the
thread of the caller, and an exception that it raises cancels the work."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
import json

from . import _iec
from .engine import _options

__all__ = ["inspect", "pack", "ptq", "verify"]

Path = str | os.PathLike[str]
Progress = Callable[[str, int, int], object]


def _convert(name: str, request: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
    return dict(json.loads(_iec.convert(name, _options(request), progress)))


def pack(model: Path, out_dir: Path, *, progress: Progress | None = None, **options: Any) -> dict[str, Any]:
    """Packs a checkpoint, a GGUF file or a pack, and quantizes it: ``bits``, ``recipe``, ``q4_map``, ``calib``, ``gate``,
    ``keep_failing``, ``tokenizer``, ``with_mtp``, ``overwrite``, ``threads``. Returns the summary of the command."""
    return _convert("pack", {"model": model, "out_dir": out_dir, **options}, progress)


def ptq(model: Path, out: Path, *, progress: Progress | None = None, **options: Any) -> dict[str, Any]:
    """Quantizes a model on trial and writes a manifest for ``pack``: ``bits``, ``scheme``, ``rules``, ``include``,
    ``exclude``, ``target_bpw``, ``target_size``, ``target_kl``, ``target_speed``, ``plan_text``, ``calib``, ``gate``,
    ``gate_text``, ``keep_failing``, ``force``, ``overwrite``, ``threads``. Returns the summary of the command."""
    return _convert("ptq", {"model": model, "out": out, **options}, progress)


def inspect(path: Path, *, tensors: bool = False, stats: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Describes a pack, a checkpoint, a weight file, a manifest or an adapter."""
    return _convert("inspect", {"path": path, "tensors": tensors, "stats": stats}, progress)


def verify(pack: Path, *, key: Path | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Compares the tensors and files of a pack with their recorded hashes, and its signature with a public key;
    ``differences`` of the result is empty if the pack is as it was made."""
    return _convert("verify", {"pack": pack, "key": key}, progress)
