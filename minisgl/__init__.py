"""minisgl: a small LLM inference engine, built chapter by chapter by the notebooks of this course.

Modules, classes and signatures are those of the official mini-sglang. Importing the package itself
loads nothing else: import the module that you need, such as `minisgl.core`.
"""

__version__ = "0.1.0"
