"""Linear attention over a sequence split across ranks (LASP, LASP-2, ZeCO)."""
