"""What the compiled CPU kernels stand on: numba functions run on torch's own thread pool.

A kernel is a C function of one argument, a pointer to 64-bit words (addresses and sizes); numba
compiles it and caches the machine code on disk, so no C compiler is needed. It is started through
`GOMP_parallel` of the OpenMP runtime that torch has loaded, on the very threads that torch's own
operators use: two pools would fight over the cores. `Unavailable` says why a machine cannot do
this; the caller then takes the reference kernels.

Knows numba, ctypes and where torch keeps its OpenMP. Knows nothing of attention.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError


class Unavailable(PacelineError):
    """This machine cannot run the compiled kernels; the message says why."""


@functools.cache
def openmp() -> ctypes.CDLL:
    """torch's own OpenMP runtime, already loaded by torch."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable("compiled CPU kernels need Linux on x86-64")
    package = Path(torch.__file__).parent
    places = [package / "lib", package.parent / "torch.libs"]
    found = [path for place in places for path in sorted(place.glob("libgomp*"))]
    if not found:
        raise Unavailable("torch was built without the GNU OpenMP runtime")
    library = ctypes.CDLL(str(found[0]))
    library.GOMP_parallel.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_uint,
    ]
    library.GOMP_parallel.restype = None
    return library


@functools.cache
def register_symbols() -> None:
    """Let compiled code ask which of how many threads it is."""
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise Unavailable(f"compiled CPU kernels need the numba package ({error})") from error
    library = openmp()
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        llvm.add_symbol(f"paceline_{name}", address)


class Kernel:
    """A compiled function and the call that runs it on every thread.

    Arguments are integers: tensor addresses, sizes, or floats as their 64-bit pattern
    (`float_bits`). The call returns when all threads are done.
    """

    def __init__(self, function: Any) -> None:
        self._run: Callable[..., None] = openmp().GOMP_parallel
        self._address: int = function.address
        self._keep = function

    def __call__(self, *arguments: int, threads: int) -> None:
        words = (ctypes.c_int64 * len(arguments))(*arguments)
        self._run(self._address, words, threads, 0)


def float_bits(value: float) -> int:
    """The bits of a float64 as an integer argument."""
    return ctypes.c_int64.from_buffer(ctypes.c_double(value)).value
