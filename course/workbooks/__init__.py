"""The chapters for readers who write the code themselves: stubs, hints, the book's answers."""
