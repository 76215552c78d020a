"""Tensor parallelism: who am I, and how do ranks talk.

Official counterpart: `python/minisgl/distributed/__init__.py`.
"""

from __future__ import annotations

from minisgl.distributed.impl import DistributedCommunicator, destroy_distributed
from minisgl.distributed.info import (
    DistributedInfo,
    get_tp_info,
    reset_tp_info,
    set_tp_info,
    try_get_tp_info,
)
