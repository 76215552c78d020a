"""What a layer is: an object whose tensors have names.

Official counterpart: `python/minisgl/layers/base.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

_STATE_DICT = dict[str, torch.Tensor]


def _concat_prefix(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _check_state_dict(owner: str, expected: _STATE_DICT, given: _STATE_DICT) -> None:
    """Raise `ValueError` listing every key of `given` that does not fit `expected`."""
    problems = [f"missing: {key}" for key in expected if key not in given]
    problems += [f"unexpected: {key}" for key in given if key not in expected]
    for key in expected.keys() & given.keys():
        old, new = expected[key], given[key]
        if old.shape != new.shape:
            shapes = f"expected {list(old.shape)}, got {list(new.shape)}"
            problems.append(f"wrong shape: {key}: {shapes}")
        if old.dtype != new.dtype:
            problems.append(f"wrong dtype: {key}: expected {old.dtype}, got {new.dtype}")
    if problems:
        shown = sorted(problems)[:12]
        if len(problems) > len(shown):
            shown.append(f"... and {len(problems) - len(shown)} more")
        lines = "\n  ".join(shown)
        raise ValueError(f"cannot load {owner}, nothing was changed:\n  {lines}")


class BaseOP:
    """A layer without `nn.Module`: its weights are its tensor attributes.

    An attribute counts if it is a tensor, or a `BaseOP` that holds some, and if its name does not
    begin with an underscore. A weight is named by its path, such as `mlp.gate_up_proj.weight`.
    What stands for a tensor counts as one: any object with its `shape` and `dtype`, and `nbytes`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer; each class defines its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward()")

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights and the nested layers with their names, in order of assignment."""
        for name, value in self.__dict__.items():
            if not name.startswith("_") and (isinstance(value, BaseOP) or hasattr(value, "nbytes")):
                yield name, value

    @property
    def nbytes(self) -> int:
        """The bytes that all weights take, in the form in which they are held now."""
        return sum(value.nbytes for _, value in self._parts())

    def state_dict(self, *, prefix: str = "", result: _STATE_DICT | None = None) -> _STATE_DICT:
        """Return every weight by name: the layer's own tensors, not copies."""
        result = {} if result is None else result
        for name, value in self._parts():
            path = _concat_prefix(prefix, name)
            if isinstance(value, BaseOP):
                value.state_dict(prefix=path, result=result)
            else:
                result[path] = value
        return result

    def load_state_dict(
        self, state_dict: _STATE_DICT, *, prefix: str = "", _internal: bool = False
    ) -> None:
        """Replace every weight by the tensor of its name, which is taken out of `state_dict`.

        Raises `ValueError` naming each missing or unexpected key and each wrong shape or dtype;
        neither the layer nor `state_dict` is changed then.
        """
        if not _internal:
            expected = self.state_dict(prefix=prefix)
            _check_state_dict(type(self).__name__, expected, state_dict)
        for name, value in list(self._parts()):
            path = _concat_prefix(prefix, name)
            if isinstance(value, BaseOP):
                value.load_state_dict(state_dict, prefix=path, _internal=True)
            else:
                setattr(self, name, state_dict.pop(path))
        self.post_load(prefix)

    def post_load(self, prefix: str = "") -> None:
        """Called once this layer's own weights are in place: the time to repack them.

        `prefix` is the layer's path; its weight is called `prefix.weight`.
        """


T = TypeVar("T", bound="BaseOP")


class StateLessOP(BaseOP):
    """A layer that owns no weights, whatever tensors it holds."""

    def _parts(self) -> Iterator[tuple[str, Any]]:
        return iter(())


class OPList(BaseOP, Generic[T]):
    """A list of layers, named by number: `layers.0.…`, `layers.1.…`."""

    def __init__(self, ops: list[T]) -> None:
        self.op_list = ops

    def _parts(self) -> Iterator[tuple[str, Any]]:
        return ((str(index), op) for index, op in enumerate(self.op_list))
