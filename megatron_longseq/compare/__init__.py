"""The same training run in several layouts, side by side: rows, a table and a picture."""
