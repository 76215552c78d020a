"""What a first use says while it works, and what libraries say (nothing)."""

from __future__ import annotations

import contextlib
import html
import os
import sys
from collections.abc import Callable
from typing import Any

MB = 1_000_000


def quiet() -> None:
    """Turn off the progress bars and the warnings of transformers and huggingface_hub.

    They go to stderr, where they would count as an output that the stored notebook lacks. This
    is the one place where they are turned off. It costs nothing if transformers isn't imported
    yet: the environment variables are read when it is.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or else a later fork prints a warning
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


class Progress:
    """Says what a first use is doing, without leaving an output in a notebook.

    A notebook on a fresh machine has to give the outputs that are stored, where the model was
    there already. stdout and stderr are out (a kernel also captures file descriptors 1 and 2,
    and with them what subprocesses print). nbval compares every kind of output but a widget
    view, and does not know `clear_output`. So in a kernel this is a display that consists of
    nothing but a widget view; it is cleared at the end, for Lab and for a run that stores
    outputs. Elsewhere it is lines on stderr.
    """

    def __init__(self) -> None:
        self._widget: Any = None
        self._last_text = ""
        self._show: Callable[[str, int], None] = self._print
        with contextlib.suppress(ImportError):
            from IPython.core.getipython import get_ipython

            if getattr(get_ipython(), "kernel", None) is not None:
                self._show = self._display

    def show(self, text: str, done_bytes: int = 0) -> None:
        """Show `text`, and the number of bytes that are there already."""
        self._show(text, done_bytes)

    def _print(self, text: str, done_bytes: int) -> None:
        if text != self._last_text:
            self._last_text = text
            print(f"{text} …", file=sys.stderr, flush=True)

    def _display(self, text: str, done_bytes: int) -> None:
        from IPython.display import display
        from ipywidgets import HTML

        amount = f" ({done_bytes / MB:.0f} MB so far)" if done_bytes >= MB else ""
        value = f"<em>{html.escape(text + amount)} …</em>"
        if self._widget is None:
            self._widget = HTML(value=value)
            view = {"model_id": self._widget.model_id, "version_major": 2, "version_minor": 0}
            display({"application/vnd.jupyter.widget-view+json": view}, raw=True)
        elif self._widget.value != value:
            self._widget.value = value

    def close(self) -> None:
        """Take the display away."""
        if self._widget is not None:
            from IPython.display import clear_output

            clear_output()
            self._widget.close()
            self._widget = None
