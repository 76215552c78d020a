"""Helpers that every part of the engine uses.

Official counterpart: `python/minisgl/utils/__init__.py`.
"""

from __future__ import annotations

from minisgl.utils.hf import cached_load_hf_config, download_hf_weight, load_tokenizer
from minisgl.utils.logger import init_logger
from minisgl.utils.misc import align_ceil, align_down, div_ceil, div_even
from minisgl.utils.registry import Registry, import_optional
from minisgl.utils.torch_utils import nvtx_annotate, torch_dtype
