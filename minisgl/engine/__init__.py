"""The engine: a model, its memory and a sampler behind one call. Official: `engine/__init__.py`."""

from __future__ import annotations

from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import Engine, ForwardOutput
from minisgl.engine.sample import BatchSamplingArgs

__all__ = ["BatchSamplingArgs", "Engine", "EngineConfig", "ForwardOutput"]
