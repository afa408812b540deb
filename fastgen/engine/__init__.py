"""Rows into steps: what runs when (scheduler), and how it runs (runner)."""
