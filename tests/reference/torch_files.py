"""Writes tests/fixtures/torch/*.bin: what torch.save writes, made with Python's own pickle and zipfile.

    python3 tests/reference/torch_files.py tests/fixtures/torch

torch itself is not needed: classes of the same names and with the same `__reduce__` results stand in for its tensors and
storages, so that the byte streams have the structure that torch.save gives them (torch/serialization.py, `_save` and
`_legacy_save`; torch/_tensor.py, `Tensor.__reduce_ex__`). Every element of tensor number t at row-major position i is
(t + 1) * 100 + i in its type (bool: i is odd), so a reader can be checked without these files' help.
"""

import io
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

torch = types.ModuleType("torch")
utils = types.ModuleType("torch._utils")
storage_module = types.ModuleType("torch.storage")
sys.modules.update({"torch": torch, "torch._utils": utils, "torch.storage": storage_module})


def function(module, name):
    def body(*args):
        raise AssertionError("never called")

    body.__name__ = body.__qualname__ = name
    body.__module__ = module.__name__
    setattr(module, name, body)
    return body


REBUILD = function(utils, "_rebuild_tensor_v2")
REBUILD_OLD = function(utils, "_rebuild_tensor")
REBUILD_V3 = function(utils, "_rebuild_tensor_v3")
PARAMETER = function(utils, "_rebuild_parameter")


def bfloat16(value):
    return struct.pack("<f", value)[2:]


# name of the storage class: how an element is written
CLASSES = {
    "FloatStorage": lambda v: struct.pack("<f", v),
    "DoubleStorage": lambda v: struct.pack("<d", v),
    "HalfStorage": lambda v: struct.pack("<e", v),
    "BFloat16Storage": bfloat16,
    "LongStorage": lambda v: struct.pack("<q", v),
    "IntStorage": lambda v: struct.pack("<i", v),
    "ShortStorage": lambda v: struct.pack("<h", v),
    "CharStorage": lambda v: struct.pack("<b", v % 100),
    "ByteStorage": lambda v: struct.pack("<B", v % 250),
    "BoolStorage": lambda v: struct.pack("<?", v % 2 == 1),
}
for class_name in CLASSES:
    setattr(torch, class_name, type(class_name, (), {"__module__": "torch"}))
storage_module.UntypedStorage = type("UntypedStorage", (), {"__module__": "torch.storage"})


class DType:
    """Pickled by name, as torch.dtype is."""

    __module__ = "torch"

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


torch.int32 = DType("int32")


class Storage:
    def __init__(self, kind, data, elements):
        self.kind, self.data, self.elements = kind, data, elements

    def class_(self):
        return getattr(torch, self.kind, None) or storage_module.UntypedStorage


class Tensor:
    def __init__(self, storage, offset, size, stride, rebuild=REBUILD, parameter=False, dtype=None):
        self.parts = (storage, offset, size, stride)
        self.rebuild, self.parameter, self.dtype = rebuild, parameter, dtype

    def __reduce_ex__(self, protocol):
        if self.parameter:
            plain = Tensor(*self.parts)
            return PARAMETER, (plain, True, OrderedDict())
        if self.rebuild is REBUILD_OLD:
            return REBUILD_OLD, self.parts
        args = self.parts + (False, OrderedDict())
        return self.rebuild, args + ((self.dtype,) if self.dtype else ())


def values(number, count):
    return [(number + 1) * 100 + i for i in range(count)]


def storage(kind, numbers):
    return Storage(kind, b"".join(CLASSES[kind](n) for n in numbers), len(numbers))


def state_dict():
    state = OrderedDict()
    number = 0
    for kind in CLASSES:
        state[f"types.{kind}"] = Tensor(storage(kind, values(number, 6)), 0, (2, 3), (3, 1))
        number += 1
    # (3, 4), stored as its transpose
    columns = [values(number, 12)[r * 4 + c] for c in range(4) for r in range(3)]
    state["transposed"] = Tensor(storage("FloatStorage", columns), 0, (3, 4), (1, 3))
    number += 1
    # two halves of one storage, and the whole of it again
    shared = storage("HalfStorage", values(number, 4) + values(number + 1, 4))
    state["shared.first"] = Tensor(shared, 0, (4,), (1,))
    state["shared.second"] = Tensor(shared, 4, (2, 2), (2, 1), parameter=True)
    number += 2
    # every other element from the second on
    gaps = [x for v in values(number, 5) for x in (0, v)]
    state["gaps"] = Tensor(storage("LongStorage", gaps), 1, (5, 1), (2, 77))
    number += 1
    state["scalar"] = Tensor(storage("FloatStorage", values(number, 1)), 0, (), ())
    number += 1
    state["empty"] = Tensor(storage("FloatStorage", []), 0, (0, 8), (8, 1))
    number += 1
    state["old"] = Tensor(storage("FloatStorage", values(number, 2)), 0, (2,), (1,), rebuild=REBUILD_OLD)
    # what torch.nn.Module.state_dict adds
    state._metadata = OrderedDict([("", {"version": 1}), ("layer", {"version": 2})])
    return state


def pickled(value, protocol, keys, legacy):
    """The pickle of a value; fills `keys` with its storages by key."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if not isinstance(obj, Storage):
                return None
            key = str(next((k for k, s in keys.items() if s is obj), len(keys)))
            keys[key] = obj
            id = ("storage", obj.class_(), key, "cpu", obj.elements)
            return id + (None,) if legacy else id

    out = io.BytesIO()
    Pickler(out, protocol).dump(value)
    return out.getvalue()


def zipped(value, protocol=2, folder="archive", zip64=False, compress=False, byteorder=b"little"):
    keys = {}
    data = pickled(value, protocol, keys, legacy=False)
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as archive:

        def entry(name, content):
            info = zipfile.ZipInfo(f"{folder}/{name}")
            info.compress_type = method
            with archive.open(info, "w", force_zip64=zip64) as file:
                file.write(content)

        entry("data.pkl", data)
        entry("byteorder", byteorder)
        for key, stored in keys.items():
            entry(f"data/{key}", stored.data)
        entry("version", b"3\n")
    return out.getvalue()


def legacy(value):
    keys = {}
    out = io.BytesIO()
    for head in (0x1950A86A20F9469CFC6C, 1001):
        out.write(pickle.dumps(head, 2))
    sizes = {"short": 2, "int": 4, "long": 4}
    out.write(pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}, 2))
    out.write(pickled(value, 2, keys, legacy=True))
    names = sorted(keys)
    out.write(pickle.dumps(names, 2))
    for key in names:
        out.write(struct.pack("<q", keys[key].elements))
        out.write(keys[key].data)
    return out.getvalue()


def untyped():
    data = b"".join(CLASSES["IntStorage"](v) for v in values(0, 6))
    kept = Storage("UntypedStorage", data, len(data))
    return {"a": Tensor(kept, 2, (2, 2), (2, 1), rebuild=REBUILD_V3, dtype=torch.int32)}


def main(directory):
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "zip.bin": zipped(state_dict()),
        "protocol4.bin": zipped(state_dict(), protocol=4),
        "protocol5_zip64.bin": zipped(state_dict(), protocol=5, zip64=True, folder="pytorch_model"),
        "legacy.bin": legacy(state_dict()),
        "wrapped.bin": zipped({"epoch": 3, "lr": 1e-3, "state_dict": state_dict(), "optimizer": {"step": [1, 2]}}),
        "untyped.bin": zipped(untyped()),
        "compressed.bin": zipped(state_dict(), compress=True),
        "big_endian.bin": zipped(state_dict(), byteorder=b"big"),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1])
