"""Cells become `minisgl`: taking apart, merging, running, checking. Imports no other room."""
