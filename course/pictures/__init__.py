"""Pictures and widgets: shapes on a canvas, and what more than one chapter draws with them."""

from course.pictures.engine import (
    STARTING,
    forward_picture,
    kv_tensor_picture,
    memory_picture,
    merge_picture,
    sampler_picture,
    start_picture,
)
from course.pictures.memory import page_table_picture, run_picture
from course.pictures.package_map import package_map
from course.pictures.requests import batch_fields_picture, life_picture

__all__ = [
    "STARTING",
    "batch_fields_picture",
    "forward_picture",
    "kv_tensor_picture",
    "life_picture",
    "memory_picture",
    "merge_picture",
    "package_map",
    "page_table_picture",
    "run_picture",
    "sampler_picture",
    "start_picture",
]
