"""Kernels in C, compiled on the machine that runs them when they are first asked for.

Official counterpart: `python/minisgl/kernel/utils.py`, whose `load_jit` compiles CUDA with TVM FFI.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

# -march=native: for this processor, with all the vector instructions that it has.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
THREADS = ("-fopenmp",)  # left out where a compiler has no OpenMP: then one thread does it all


def _processor() -> str:
    """What distinguishes this processor: code for one may crash another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.platform() + platform.processor()
    told = ("model name", "flags", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(told)))


def _compile(source: str, compiler: str, flags: tuple[str, ...]) -> Path:
    """The library of `source`, from the cache or made anew; RuntimeError with what went wrong."""
    text = "\n".join((source, compiler, *flags, _processor()))
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = cache_home / "minisgl" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            made = Path(folder) / "made.so"
            command = [compiler, *flags, "-x", "c", "-", "-o", str(made), "-lm"]
            run = subprocess.run(command, input=source, capture_output=True, text=True)
            if run.returncode != 0:
                raise RuntimeError(run.stderr)
            made.replace(found)  # whole or not at all, whoever else compiles the same
    return found


# What a letter stands for: an address, a size (int64_t), a number (int), a float.
PARAMETERS = {"a": ctypes.c_void_p, "s": ctypes.c_int64, "n": ctypes.c_int, "f": ctypes.c_float}

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Function:
    """A C function that is called; but while somebody listens, its calls are noted instead."""

    listening: ClassVar[list[Call] | None] = None  # where to; one list for all functions

    def __init__(self, function: Callable[..., int]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> int:
        if Function.listening is not None:
            Function.listening.append((self.function, args))
            return 1  # as if it could
        return self.function(*args)


@cache
def load_jit(source: str, **functions: str) -> ctypes.CDLL | None:
    """The functions of a C source, or None where there is no C compiler or it can't compile this.

    `functions` tells what the parameters of each function are, a letter of `PARAMETERS` for each.
    What a function returns is taken for an `int`: 0 if it could not do what it was asked to. As an
    attribute of the library each of them is a `Function`.

    The compiler is `CC`, else `cc`. What it makes is kept in `~/.cache/minisgl`. None as well when
    `MINISGL_JIT=0` is set. Whoever asks must have another way to do the same.
    """
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None or os.environ.get("MINISGL_JIT") == "0":
        return None
    for flags in ((*FLAGS, *THREADS), FLAGS):
        try:
            library = ctypes.CDLL(str(_compile(source, compiler, flags)))
        except (RuntimeError, OSError):
            continue
        for name, letters in functions.items():
            function = getattr(library, name)
            function.argtypes = [PARAMETERS[letter] for letter in letters]
            setattr(library, name, Function(function))
        return library
    return None


# What the sources have in common: a vector of eight numbers, for any processor that GCC or Clang
# compiles for, and the two types that weights, K and V may have.
LANES = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint16_t pairs __attribute__((vector_size(4 * LANES), aligned(2)));
typedef uint16_t bfloat16; /* the upper half of a float */

static inline lanes read_float(const float *p) { return *(const lanes *)p; }
static inline lanes read_bfloat16(const bfloat16 *p) {
  return (lanes)(__builtin_convertvector(*(const halves *)p, bits) << 16);
}
static inline void write_float(float *p, lanes v) { *(lanes *)p = v; }
static inline void write_bfloat16(bfloat16 *p, lanes v) { /* rounded to the nearest, ties to even */
  bits b = (bits)v, up = b + 0x7fff + (b >> 16 & 1), nan = (bits)(v != v);
  *(halves *)p = __builtin_convertvector((~nan & up >> 16) | (nan & 0x7fc0), halves);
}
static inline float one_float(float x) { return x; }
static inline float one_bfloat16(bfloat16 x) {
  uint32_t wide = (uint32_t)x << 16;
  float y;
  memcpy(&y, &wide, sizeof y);
  return y;
}
static inline float round_float(float x) { return x; }
static inline bfloat16 round_bfloat16(float x) {
  bfloat16 y[LANES];
  write_bfloat16(y, x - (lanes){0});
  return y[0];
}
static inline lanes spread_float(const float *p) { return *p - (lanes){0}; } /* in all lanes */
static inline lanes spread_bfloat16(const bfloat16 *p) { /* twice into each, and one shifted out */
  return (lanes)((bits)(*p - (pairs){0}) << 16);
}
static inline float sum(lanes v) {
  return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}
"""

TYPES = {"float": torch.float32, "bfloat16": torch.bfloat16}  # what TYPE stands for in sources


def as_floats(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, one number after the other: itself if it is so already."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


# e**x for eight numbers at once, none of them positive.
EXPONENTIAL = r"""
static inline lanes exponential(lanes x) { /* of x <= 0, as 2**n * e**r with |r| <= ln(2) / 2 */
  lanes n = x * 1.44269504f + 12582912.0f; /* + 1.5 * 2**23: no digits are left for fractions */
  bits power = ((bits)n + 127) << 23;
  n -= 12582912.0f;
  lanes r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln(2) in two parts */
  lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;   /* the polynomial of Cephes' expf */
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (lanes)((bits)(p * (lanes)power) & ~(bits)(x <= -87.0f)); /* there: 0; NaN stays NaN */
}
"""
