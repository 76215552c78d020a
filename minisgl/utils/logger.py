"""Log lines that say which part of which process speaks.

Official counterpart: `python/minisgl/utils/logger.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from minisgl.distributed.info import try_get_tp_info


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at that moment: notebooks and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class RankLogger(logging.LoggerAdapter):
    """A logger whose lines begin with the rank and process that wrote them, if asked for."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        """Put the prefix before the message, with the rank as it is now.

        `self.extra` holds `suffix`, `use_pid` and `use_tp_rank`. The prefix is made of the parts
        that are wanted, as in `[loader|rank=1|pid=4711] message`; without any there is none. If
        `use_tp_rank` is None the rank is shown where there are several. Returns (message, kwargs).
        """
        settings: dict[str, Any] = dict(self.extra or {})
        tp = try_get_tp_info()
        shows_rank = settings["use_tp_rank"]
        parts = [settings["suffix"]]
        if tp is not None and (tp.size > 1 if shows_rank is None else shows_rank):
            parts.append(f"rank={tp.rank}")
        if settings["use_pid"]:
            parts.append(f"pid={os.getpid()}")
        prefix = "|".join(part for part in parts if part)
        return (f"[{prefix}] {msg}" if prefix else msg), kwargs

    def info_rank0(self, msg: str, *args: object) -> None:
        """Like `info`, but only on rank 0: for what is the same on every rank."""
        if (tp := try_get_tp_info()) is None or tp.is_primary():
            self.info(msg, *args)

    def warning_rank0(self, msg: str, *args: object) -> None:
        """Like `warning`, but only on rank 0."""
        if (tp := try_get_tp_info()) is None or tp.is_primary():
            self.warning(msg, *args)


def init_logger(
    name: str,
    suffix: str = "",
    *,
    strip_file: bool = True,
    level: str | None = None,
    use_pid: bool | None = None,
    use_tp_rank: bool | None = None,
) -> RankLogger:
    """The logger of one module; call it as `init_logger(__name__)`.

    `suffix` goes before each message. `level` is "DEBUG", "INFO", …; without it the environment
    variable LOG_LEVEL counts, and without that "WARNING", so that a library stays quiet.
    With `strip_file` a `name` that ends in `.py` is a file path, of which only the stem is kept.
    `use_pid` and `use_tp_rank` add the process and the rank; if `use_tp_rank` is None, the rank is
    added when there are several.
    """
    logger = logging.getLogger(Path(name).stem if strip_file and name.endswith(".py") else name)
    logger.setLevel((level or os.environ.get("LOG_LEVEL") or "WARNING").upper())
    logger.propagate = False
    if not logger.handlers:
        layout = "[%(asctime)s|%(name)s] %(levelname)s %(message)s"
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(layout, "%Y-%m-%d|%H:%M:%S"))
        logger.addHandler(handler)
    settings = {"suffix": suffix, "use_pid": bool(use_pid), "use_tp_rank": use_tp_rank}
    return RankLogger(logger, settings)
