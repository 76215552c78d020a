"""The one place where a linear layer is multiplied out, by a kernel chosen by name.

The official layers call `F.linear` directly. Here that is the kernel named "torch". Another kernel
is a file `kernel/linear_NAME.py` that defines `create_linear_kernel()`: nothing else has to
change for it to be found.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.nn.functional as F


class LinearKernel(ABC):
    """One way to compute `x @ weight.T + bias`."""

    def prepare(self, weight: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
        """Return `weight` in the form that `apply` likes best; shape and dtype stay.

        Called once per layer, right after its weight was loaded. The layer keeps only what is
        returned, so a kernel that packs weights holds no second copy. A `shared` weight, the table
        of an LM head tied to the embedding, must be returned as it is: its rows are still read.
        """
        return weight

    @abstractmethod
    def apply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply: `x` is `[n, in]`, `weight` is `[out, in]`, the result `[n, out]`.

        `weight` may be prepared or not.
        """


class TorchLinear(LinearKernel):
    """The reference: `F.linear` on the weight as it was loaded."""

    def apply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x, weight, bias)


_LINEAR_KERNEL = "auto"


def supported_linear_kernels() -> list[str]:
    """Return the names that `set_linear_kernel` takes."""
    files = Path(__file__).parent.glob("linear_*.py")
    return sorted({"auto", "torch", *(file.stem.removeprefix("linear_") for file in files)})


def set_linear_kernel(name: str) -> None:
    """Choose the kernel of every linear layer built from now on.

    "auto" stands for the kernel of that name when `kernel/linear_auto.py` exists, and for "torch"
    until then. Raises `ValueError`, with the name, for an unknown one; the old choice then stays.
    """
    global _LINEAR_KERNEL
    if name not in supported_linear_kernels():
        known = ", ".join(supported_linear_kernels())
        raise ValueError(f"unknown linear kernel {name!r}; there are: {known}")
    _LINEAR_KERNEL = name


def get_linear_kernel() -> LinearKernel:
    """Return the kernel that `set_linear_kernel` chose, loading its file on first use."""
    name = _LINEAR_KERNEL
    is_file = Path(__file__).with_name(f"linear_{name}.py").is_file()
    if name == "torch" or (name == "auto" and not is_file):
        return TorchLinear()
    module = importlib.import_module(f"minisgl.kernel.linear_{name}")
    kernel: LinearKernel = module.create_linear_kernel()
    return kernel
