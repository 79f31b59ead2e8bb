#!/usr/bin/env python3
"""Compiles every kernel to the PTX that ships beside it. Needs no GPU:

    pip install nvidia-cuda-nvrtc-cu12==12.2.140
    python3 .ci/kernels.py            # writes each .ptx
    python3 .ci/kernels.py --check    # fails when one is not what its .cu makes

This version of the compiler writes PTX that drivers from 535 on take, for any GPU from Volta on.
"""

import argparse
import ctypes
import importlib.util
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = [
    ROOT / "manager/src/device/cuda/kernel/copy_rows.cu",
    ROOT / "benches/kernels/kernels.cu",
]
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++14"]


def load():
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    if spec is None:
        sys.exit("no compiler: pip install nvidia-cuda-nvrtc-cu12==12.2.140")
    (folder,) = spec.submodule_search_locations
    folder = pathlib.Path(folder) / "lib"
    # The compiler opens its builtins by name alone.
    for builtins in folder.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.12"))


def compiled(nvrtc, source):
    program = ctypes.c_void_p()

    def text(size_of, read):
        size = ctypes.c_size_t()
        getattr(nvrtc, size_of)(program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, read)(program, out)
        return out.value

    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
    )
    if made != 0:
        sys.exit(f"nvrtcCreateProgram: {made}")
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options) != 0:
        sys.exit(text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode())
    return text("nvrtcGetPTXSize", "nvrtcGetPTX").rstrip() + b"\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    nvrtc = load()
    for source in SOURCES:
        ptx, target = compiled(nvrtc, source), source.with_suffix(".ptx")
        if not arguments.check:
            target.write_bytes(ptx)
        elif not target.exists() or target.read_bytes() != ptx:
            sys.exit(f"{target.name} is not what {source.name} compiles to: run .ci/kernels.py")


if __name__ == "__main__":
    main()
