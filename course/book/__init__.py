"""The pages of the book: what Sphinx does with the notebooks, and the links between them."""
