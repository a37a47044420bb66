"""Copy values to the host before the script reads them.

``copies.py`` makes the copies, ``reads.py`` learns which values are read, and ``names.py`` finds where the
script keeps them.
"""
