"""Is a layout right? A run against one process, from the same weights and data.

``capture.py`` runs inside the ranks and records; ``comparison.py`` puts the ranks' pieces together
and compares; ``runs.py`` makes the two command lines; ``cli/verify.py`` prints the verdict.
"""
