"""The checkpoints that the notebooks run on: one real model, and small random ones.

`model` gives the folder of the course's default model, which is SmolLM2-135M-Instruct, kept in a
cache folder outside the repository. `tiny` writes a small random checkpoint of a given
architecture. Both are ordinary Hugging Face folders (config.json, safetensors), so that the loading
code of the course is the same for all of them.
"""

from course.checkpoints.default import cache_dir, model
from course.checkpoints.progress import quiet
from course.checkpoints.source import ModelUnavailable, Source
from course.checkpoints.tiny import TINY_NAMES, tiny

__all__ = ["TINY_NAMES", "ModelUnavailable", "Source", "cache_dir", "model", "quiet", "tiny"]
