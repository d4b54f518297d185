#!/usr/bin/env python3
"""Compiles src/runtime/cuda/kernels/kernels.cu to PTX, and assembles PTX for the GPUs that are supported.

    make_ptx.py compile TOOLS KERNELS OUT    writes OUT/compute_75.ptx and OUT/compute_80.ptx
    make_ptx.py assemble TOOLS PTX [-v]      assembles both; -v prints what kernels need at most

TOOLS is where the wheels of cuda_tools.txt were unpacked; scripts/ptx.sh does that and calls this. The same sources give the same
bytes wherever they lie: comments are dropped, and NVRTC is given file names without directories.
"""

import concurrent.futures
import ctypes
import os
import pathlib
import re
import subprocess
import sys

ARCHITECTURES = ["compute_75", "compute_80"]
# Assembler, PTX, and the GPUs it is assembled for.
ASSEMBLED = [
    ("cuda_nvcc", "compute_75", ["sm_75"]),
    ("cuda_nvcc", "compute_80", ["sm_80", "sm_86", "sm_89", "sm_90"]),
    ("cu13", "compute_75", ["sm_75"]),
    ("cu13", "compute_80", ["sm_80", "sm_90", "sm_100", "sm_120"]),
]
# Bytes that a kernel may store for lack of registers.
MOST_SPILLED = 64


class Nvrtc:
    def __init__(self, tools):
        self.lib = ctypes.CDLL(str(tools / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))

    def call(self, name, *arguments):
        code = getattr(self.lib, "nvrtc" + name)(*arguments)
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        return None if code == 0 else self.lib.nvrtcGetErrorString(code).decode()

    def text(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, buffer)
        return buffer.value.decode()

    def compile(self, kernels, include, architecture):
        headers = sorted(kernels.glob("*.cuh"))
        sources = (ctypes.c_char_p * len(headers))(*[h.read_bytes() for h in headers])
        names = (ctypes.c_char_p * len(headers))(*[h.name.encode() for h in headers])
        program = ctypes.c_void_p()
        source = (kernels / "kernels.cu").read_bytes()
        self.call("CreateProgram", ctypes.byref(program), source, b"kernels.cu", len(headers), sources, names)
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", f"-I{include}"]
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        error = self.call("CompileProgram", program, len(options), array)
        log = self.text(program, "ProgramLog").strip()
        if log:
            print(log, file=sys.stderr)
        if error:
            sys.exit(f"{architecture}: {error}")
        return self.text(program, "PTX")


def without_comments(ptx):
    lines = (re.sub(r"\s*//.*", "", line).rstrip() for line in ptx.splitlines())
    return "".join(line + "\n" for line in lines if line)


def compile_one(tools, kernels, out, architecture):
    ptx = Nvrtc(tools).compile(kernels, tools / "nvidia/cuda_runtime/include", architecture)
    (out / f"{architecture}.ptx").write_text(without_comments(ptx))


def compile_all(tools, kernels, out):
    with concurrent.futures.ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for task in [pool.submit(compile_one, tools, kernels, out, a) for a in ARCHITECTURES]:
            task.result()


def assemble_one(tools, ptx, assembler, architecture, gpu):
    command = [tools / f"nvidia/{assembler}/bin/ptxas", "-v", f"-arch={gpu}", ptx / f"{architecture}.ptx", "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{assembler} {gpu}: {done.stderr}")
    return [(assembler, gpu, *kernel) for kernel in read_report(done.stderr)]


def read_report(text):
    """Name, registers, bytes spilled and bytes of static shared memory of each kernel."""
    name = None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            name, spilled = found[1], 0
        elif (found := re.search(r"(\d+) bytes spill stores", line)) and name:
            spilled = int(found[1])
        elif (found := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", line)
            yield name, int(found[1]), spilled, int(shared[1]) if shared else 0
            name = None


def assemble_all(tools, ptx, verbose):
    jobs = [(assembler, architecture, gpu) for assembler, architecture, gpus in ASSEMBLED for gpu in gpus]
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        tasks = [pool.submit(assemble_one, tools, ptx, *job) for job in jobs]
        kernels = [kernel for task in tasks for kernel in task.result()]
    if verbose:
        print_worst(kernels)
    bad = [k for k in kernels if k[4] > MOST_SPILLED]
    for assembler, gpu, name, _, spilled, _ in bad:
        print(f"{assembler} {gpu}: {name} spills {spilled} bytes, at most {MOST_SPILLED} are allowed", file=sys.stderr)
    print(f"{len(kernels)} kernels assembled for {len(jobs)} targets, at most {max(k[3] for k in kernels)} registers")
    return 1 if bad else 0


def print_worst(kernels):
    worst = {}
    for _, gpu, name, *numbers in kernels:
        key = (name, "compute_75" if gpu == "sm_75" else "compute_80")
        worst[key] = [max(pair) for pair in zip(worst.get(key, [0, 0, 0]), numbers)]
    print(f"{'kernel':40} {'PTX':10} registers  spilled  shared (most over GPUs and assemblers, bytes)")
    for (name, ptx), (registers, spilled, shared) in sorted(worst.items()):
        print(f"{name:40} {ptx:10} {registers:9} {spilled:8} {shared:7}")


def main():
    command, *paths = sys.argv[1:]
    tools, *rest = [pathlib.Path(p).resolve() for p in paths if p != "-v"]
    if command == "compile":
        return compile_all(tools, *rest)
    return assemble_all(tools, *rest, "-v" in paths)


if __name__ == "__main__":
    sys.exit(main())
