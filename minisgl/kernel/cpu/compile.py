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
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from minisgl.utils.logger import init_logger

logger = init_logger(__name__)

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
    code = [line for line in source.splitlines() if not line.startswith("#line")]
    text = "\n".join((*code, compiler, *flags, _processor()))
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


TYPES = {"float": torch.float32, "bfloat16": torch.bfloat16}  # what TYPE stands for in C


def assemble(pieces: Sequence[str], file: str | None = None) -> str:
    """One C source of pieces that stand, as strings, in the Python file `file` or in this one.

    A piece with the word TYPE comes once for each of `TYPES`. The `#line` before each lets the
    compiler's messages name a line of the Python file.
    """
    source = []
    for piece in pieces:
        for path in map(Path, filter(None, (file, __file__))):
            before, found, _ = path.read_text(encoding="utf-8").partition(piece)
            if found:
                name = "/".join(path.parts[-4:])
                piece = f'#line {before.count(chr(10)) + 1} "{name}"\n{piece}'
                break
        source += [piece.replace("TYPE", name) for name in TYPES] if "TYPE" in piece else [piece]
    return "\n".join(source)


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
def find_compiler() -> str | None:
    """The C compiler, `CC` or else `cc`; None without one, and where `MINISGL_JIT=0` is set."""
    if os.environ.get("MINISGL_JIT") == "0":
        logger.info("MINISGL_JIT=0: nothing is compiled, PyTorch does everything")
        return None
    command = os.environ.get("CC") or "cc"
    if (found := shutil.which(command)) is None:
        logger.warning("no C compiler (%s): PyTorch does everything, and slower", command)
    return found


@cache
def load_jit(*pieces: str, file: str | None = None, **functions: str) -> ctypes.CDLL | None:
    """The functions of a C source, or None where there is no compiler or it can't compile this.

    The source is `assemble(pieces, file)`. `functions` tells what the parameters of each function
    are, a letter of `PARAMETERS` for each. What a function returns is taken for an `int`: 0 if it
    could not do what it was asked to. As an attribute of the library each of them is a `Function`.

    The library is kept in `~/.cache/minisgl`; what a compiler objects to is logged. Whoever calls
    must have another way to do the same.
    """
    objection, compiler = "", find_compiler()
    if compiler is None:
        return None
    for flags in ((*FLAGS, *THREADS), FLAGS):
        try:
            library = ctypes.CDLL(str(_compile(assemble(pieces, file), compiler, flags)))
        except (RuntimeError, OSError) as error:
            objection = str(error)
            continue
        for name, letters in functions.items():
            function = getattr(library, name)
            function.argtypes = [PARAMETERS[letter] for letter in letters]
            setattr(library, name, Function(function))
        return library
    logger.error("C that can't be compiled, PyTorch does the same:\n%s", objection)
    return None


# A vector of floats for any processor that GCC or Clang compiles for, and the two types that
# weights, K and V may have.
VECTOR_C = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#define SUM(v) _mm512_reduce_add_ps((__m512)(v))
#else
#define LANES 8
#define SUM(v) (((v)[0] + (v)[4] + ((v)[1] + (v)[5])) + ((v)[2] + (v)[6] + ((v)[3] + (v)[7])))
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint16_t bfloat16; /* the upper half of a float */

static inline vec load_float(const float *p) { return *(const vec *)p; }
static inline vec load_bfloat16(const bfloat16 *p) {
  return (vec)(__builtin_convertvector(*(const halves *)p, bits) << 16);
}
static inline void store_float(float *p, vec v) { *(vec *)p = v; }
static inline void store_bfloat16(bfloat16 *p, vec v) { /* rounded to nearest, ties to even */
  bits b = (bits)v, up = b + 0x7fff + (b >> 16 & 1), nan = (bits)(v != v);
  *(halves *)p = __builtin_convertvector((~nan & up >> 16) | (nan & 0x7fc0), halves);
}
"""

NUMBER_C = r"""
static inline float get_float(const float *p) { return *p; }
static inline float get_bfloat16(const bfloat16 *p) {
  uint32_t wide = (uint32_t)*p << 16;
  float x;
  memcpy(&x, &wide, sizeof x);
  return x;
}
static inline void put_float(float *p, float x) { *p = x; }
static inline void put_bfloat16(bfloat16 *p, float x) {
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  *p = x != x ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
static inline void prefetch(const void *p, int64_t bytes) { /* into the second-level cache */
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}
"""

COMMON_C = (VECTOR_C, NUMBER_C)  # what all sources begin with

# What a lane multiplies at a time.
WORD_C = r"""
/* A word of 32 bits: one number as a float or, where an instruction multiplies and adds pairs of
   them, two bfloat16. */
typedef uint32_t word;
#define PER_float 1
static inline word word_float(const float *p) { return (union { float x; word w; }){*p}.w; }
static inline vec words_float(const float *p) { return load_float(p); }
static inline vec madd_float(vec acc, vec w, vec x) { return acc + w * x; }

#ifdef __AVX512BF16__
#define PER_bfloat16 2
static inline word word_bfloat16(const bfloat16 *p) { return p[0] | (word)p[1] << 16; }
static inline vec words_bfloat16(const bfloat16 *p) { return *(const vec *)p; }
static inline vec madd_bfloat16(vec acc, vec w, vec x) {
  return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
}
#else
#define PER_bfloat16 1
static inline word word_bfloat16(const bfloat16 *p) { return (word)*p << 16; }
static inline vec words_bfloat16(const bfloat16 *p) { return load_bfloat16(p); }
static inline vec madd_bfloat16(vec acc, vec w, vec x) { return acc + w * x; }
#endif
"""

# e**x for a vector of numbers, none of them positive.
EXP_C = r"""
static inline vec exponential(vec x) { /* of x <= 0, as 2**n * e**r with |r| <= ln(2) / 2 */
  vec n = x * 1.44269504f + 12582912.0f; /* + 1.5 * 2**23: no digits are left for fractions */
  bits power = ((bits)n + 127) << 23;
  n -= 12582912.0f;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln(2) in two parts */
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;   /* the polynomial of Cephes' expf */
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (vec)((bits)(p * (vec)power) & ~(bits)(x <= -87.0f)); /* there: 0; NaN stays NaN */
}
"""
