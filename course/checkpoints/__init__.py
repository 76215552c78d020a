"""The checkpoints that the notebooks run on: one real model, and small random ones."""

from course.checkpoints.default import (
    TINY_NAMES,
    ModelUnavailable,
    Source,
    cache_dir,
    model,
    quiet,
    tiny,
)

__all__ = ["TINY_NAMES", "ModelUnavailable", "Source", "cache_dir", "model", "quiet", "tiny"]
