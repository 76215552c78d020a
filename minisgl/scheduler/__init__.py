"""Who runs next, on which row and in which pages.

Kept light on purpose: import what you need from the modules in here.

Official counterpart: `python/minisgl/scheduler/__init__.py`.
"""

from __future__ import annotations
